// What each tool must find: race: shared memory that another warp reads without a barrier; sync: __syncwarp with a mask
// that leaves out the calling thread; bounds: a write behind an allocation.
#include <cstdio>
#include <cstring>

__global__ void race(int* out) {
  __shared__ int values[128];
  values[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = values[127 - threadIdx.x];
}

__global__ void sync(int* out) {
  if (threadIdx.x < 8) __syncwarp(0xff00);
  out[threadIdx.x] = 1;
}

__global__ void bounds(int* out) { out[threadIdx.x + 64] = 1; }

int main(int count, char** names) {
  const char* name = count > 1 ? names[1] : "";
  int* out;
  cudaMalloc(&out, 128 * sizeof(int));
  if (!strcmp(name, "race")) race<<<1, 128>>>(out);
  if (!strcmp(name, "sync")) sync<<<1, 32>>>(out);
  if (!strcmp(name, "bounds")) bounds<<<1, 128>>>(out);
  printf("%s: %s\n", name, cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}
