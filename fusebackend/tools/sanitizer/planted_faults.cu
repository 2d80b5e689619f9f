// A program with one fault for each tool of compute-sanitizer. Its argument is the name of a tool: that tool must find the fault.
#include <cstring>

__global__ void memcheck(int* p) { p[64 + threadIdx.x] = 1; }  // writes behind the allocation

__global__ void racecheck(int* p) {  // reads what another thread writes, without a barrier
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  p[threadIdx.x] = s[63 - threadIdx.x];
}

__global__ void initcheck(int* p) { p[threadIdx.x] += 1; }  // reads memory that nothing has written

__global__ void synccheck(int* p) {  // a barrier that not all threads of a warp reach
  if (threadIdx.x < 40) __syncthreads();
  p[threadIdx.x] = 1;
}

int main(int, char** argv) {
  int* p;
  cudaMalloc(&p, 64 * sizeof(int));
  if (!strcmp(argv[1], "memcheck")) memcheck<<<1, 64>>>(p);
  if (!strcmp(argv[1], "racecheck")) racecheck<<<1, 64>>>(p);
  if (!strcmp(argv[1], "initcheck")) initcheck<<<1, 64>>>(p);
  if (!strcmp(argv[1], "synccheck")) synccheck<<<1, 64>>>(p);
  return cudaDeviceSynchronize() != cudaSuccess;
}
