// What was compiled at run time, kept in files for the next process.
#pragma once

#include <string>

namespace fusebackend {

// What was kept under exactly this name, which says all that the code depends on; empty if nothing was, or the file is not what was written.
std::string kept_code(const std::string& name);

// Keeps `content` for later processes. Where that can't be done, nothing is kept.
void keep_code(const std::string& name, const std::string& content);

}  // namespace fusebackend

// Names the folder, which nobody else may be able to write. Nothing is kept, nor looked for, before that, or in "".
extern "C" __attribute__((visibility("default"))) void fusebackend_keep_code_in(const char* folder);
