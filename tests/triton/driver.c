// A CUDA driver for tests, which runs nothing and refuses launches that a Hopper GPU would refuse.
//
// Triton's own launcher calls it. Each launch is a line in the file $FAKE_CUDA_LOG:
//     launch NAME GRID_X GRID_Y GRID_Z THREADS SHARED
// Limits: CUDA C++ Programming Guide, compute capability 9.0.

#include "cuda.h"
#include <stdio.h>
#include <stdlib.h>

enum { MOST_KERNELS = 8192, MOST_SHARED = 232448, DEFAULT_SHARED = 49152 };

static struct {
  char name[160];
  int shared;
} kernels[MOST_KERNELS];
static int kernel_count = 0;
static char said[256] = "no error";

static CUresult refused(const char *why) {
  snprintf(said, sizeof said, "%s", why);
  return CUDA_ERROR_INVALID_VALUE;
}

static size_t of(CUfunction function) { return (size_t)function - 1; }

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return *context = (CUcontext)1, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 1 << 20, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return *(CUdeviceptr *)data = pointer, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  return *clusters = 1, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = said, CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = MOST_SHARED; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = DEFAULT_SHARED; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1000000;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)1, CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  if (kernel_count == MOST_KERNELS) return refused("too many kernels for the test's driver");
  snprintf(kernels[kernel_count].name, sizeof kernels[0].name, "%s", name);
  kernels[kernel_count].shared = DEFAULT_SHARED;
  *function = (CUfunction)(size_t)++kernel_count;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  // Spills are unknown here, so report some for every kernel. We then check its machine code.
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES ? 4 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value > MOST_SHARED) return refused("more shared memory than a block can have");
    kernels[of(function)].shared = value;
  }
  // Triton 3.8 first tries CU_FUNC_ATTRIBUTE_SHARED_MEMORY_MODE, which only later GPUs have.
  if (attribute >= 17) return refused("an attribute that a Hopper GPU does not have");
  return CUDA_SUCCESS;
}

static FILE *opened(void) {
  const char *path = getenv("FAKE_CUDA_LOG");
  return path ? fopen(path, "a") : NULL;
}

// Some of the conditions of CUDA's driver API for a descriptor of the bulk copy engine.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (!rank || rank > 5 || (size_t)address % 16) return refused("rank or address of a tensor map");
  for (cuuint32_t n = 0; n < rank; ++n)
    if (!sizes[n] || sizes[n] > 1ull << 32 || !box[n] || box[n] > 256 || !steps[n] || steps[n] > 8)
      return refused("a size of a tensor map");
  for (cuuint32_t n = 0; n + 1 < rank; ++n)
    if (!strides[n] || strides[n] % 16 || strides[n] >= 1ull << 40) return refused("a stride of a tensor map");
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  if (!config->gridDimX || !config->gridDimY || !config->gridDimZ) return refused("an empty grid");
  if (config->gridDimX > 0x7fffffffu) return refused("a grid too long in x");
  if (config->gridDimY > 65535 || config->gridDimZ > 65535) return refused("a grid too long in y or z");
  if (config->blockDimX * config->blockDimY * config->blockDimZ > 1024) return refused("too many threads");
  if ((int)config->sharedMemBytes > kernels[of(function)].shared) return refused("shared memory not asked for");
  FILE *log = opened();
  if (log) {
    fprintf(log, "launch %s %u %u %u %u %u\n", kernels[of(function)].name, config->gridDimX, config->gridDimY,
            config->gridDimZ, config->blockDimX, config->sharedMemBytes);
    fclose(log);
  }
  return CUDA_SUCCESS;
}
