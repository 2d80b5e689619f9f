import pytest

from fusebackend.native import kept_code, loader


@pytest.fixture(autouse=True)
def nothing_is_kept():
    """No test finds what another process compiled."""
    native = loader.load()
    if native.library is None:
        yield
        return
    kept_code.keep_in(native.library, None)
    yield
    kept_code.keep(native.library, native.key)
