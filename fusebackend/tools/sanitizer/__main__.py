"""``python -m fusebackend.tools.sanitizer``"""

import sys

from fusebackend.tools.sanitizer.runner import main

if __name__ == "__main__":
    sys.exit(main())
