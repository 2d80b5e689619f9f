// Units in which a GPU moves memory, in bytes.
#pragma once

namespace fusebackend::tile {

constexpr int kChunkBytes = 16;   // the widest access of a thread
constexpr int kSectorBytes = 32;  // the least that L2 and DRAM move
constexpr int kLineBytes = 128;   // a cache line, and a row of shared memory's banks

}  // namespace fusebackend::tile
