// A stub of NVML (libnvidia-ml.so.1) for machines without a GPU. It reads its answers from the file $STUB_NVML at each call:
//
//     gpu UUID POWER_MW ENERGY_MJ CLOCK_REASONS     one line for each GPU, in order
//     process INDEX PID                             one line for each process that computes on GPU number INDEX
//
// Names, arguments and structures are those of NVML's public header (nvml.h, CUDA 12 and 13). Functions that are not
// defined here are missing for the Python binding too, as in an old driver. OLD_DRIVER: a driver before version 510.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7 };

struct Gpu {
  std::string uuid;
  unsigned power_mw = 0;
  unsigned long long energy_mj = 0, clock_reasons = 0;
  std::vector<unsigned> pids;
};

struct Process {  // nvmlProcessInfo_v2_t
  unsigned pid;
  unsigned long long memory_bytes;
  unsigned gpu_instance, compute_instance;
};

std::vector<Gpu> gpus() {
  std::vector<Gpu> found;
  std::ifstream file(std::getenv("STUB_NVML"));
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    if (kind == "gpu") {
      Gpu gpu;
      words >> gpu.uuid >> gpu.power_mw >> gpu.energy_mj >> gpu.clock_reasons;
      found.push_back(gpu);
    } else if (kind == "process") {
      unsigned index, pid;
      words >> index >> pid;
      found.at(index).pids.push_back(pid);
    }
  }
  return found;
}

size_t index_of(void* handle) { return reinterpret_cast<size_t>(handle) - 1; }

Gpu of(void* handle) { return gpus().at(index_of(handle)); }

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) { return SUCCESS; }
int nvmlInit_v2() { return SUCCESS; }
int nvmlShutdown() { return SUCCESS; }
const char* nvmlErrorString(int) { return "the stub's error"; }

int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::strncpy(text, "580.00", size);
  return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = gpus().size();
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if (index >= gpus().size()) return INVALID_ARGUMENT;
  *handle = reinterpret_cast<void*>(static_cast<size_t>(index) + 1);
  return SUCCESS;
}

int nvmlDeviceGetUUID(void* handle, char* text, unsigned size) {
  std::strncpy(text, of(handle).uuid.c_str(), size);
  return SUCCESS;
}

int nvmlDeviceGetName(void*, char* text, unsigned size) {
  std::strncpy(text, "NVIDIA Stub", size);
  return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void* handle, unsigned* milliwatts) {
  *milliwatts = of(handle).power_mw;
  return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(void* handle, unsigned long long* millijoules) {
  *millijoules = of(handle).energy_mj;
  return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void* handle, unsigned long long* reasons) {
  *reasons = of(handle).clock_reasons;
  return SUCCESS;
}

#ifdef OLD_DRIVER
#define nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetComputeRunningProcesses_v2
#endif

int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, Process* processes) {
  auto pids = of(handle).pids;
  unsigned room = processes ? *count : 0;
  *count = pids.size();
  if (pids.size() > room) return INSUFFICIENT_SIZE;
  for (size_t place = 0; place < pids.size(); ++place) processes[place] = {pids[place], 1ull << 30, ~0u, ~0u};
  return SUCCESS;
}
}
