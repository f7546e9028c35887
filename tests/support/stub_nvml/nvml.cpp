// A stub of NVML (libnvidia-ml.so.1) for machines without a GPU. It reads its answers from the file $STUB_NVML, again whenever
// the file was replaced:
//
//     gpu uuid=GPU-1 power_mw=250000 ...     one line for each GPU, in order; a question without an answer is not supported
//     mig INDEX uuid=MIG-1 used=...          one line for each MIG instance of GPU number INDEX
//     process INDEX PID                      one line for each process that computes on GPU number INDEX
//     xid INDEX NUMBER                       one line for each error that the driver reported; each is told once
//
// An answer such as energy_mj=1000+250 grows by 250 per second. A GPU with narrow=1 has counters of 32 bits. A GPU with lost=1
// answers NVML_ERROR_GPU_IS_LOST. If $STUB_NVML_CALLS is set, each question appends a line to that file.
// Names, arguments and structures are those of NVML's public header (nvml.h, CUDA 12 and 13). Functions that are not
// defined here are missing for the Python binding too, as in an old driver. OLD_DRIVER: a driver before version 510.
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, LOST = 15 };
enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3, XID_EVENT = 8, SM_CLOCK = 1, MEMORY_CLOCK = 2 };
constexpr unsigned ALL_LINKS = 0xFFFFFFFF;
constexpr size_t INSTANCES = 1000;  // handles above it are of MIG instances

struct Gpu {
  std::map<std::string, std::string> answers;
  std::vector<unsigned> pids;
  std::vector<Gpu> instances;

  bool has(const std::string& name) const { return answers.count(name); }
  unsigned long long number(const std::string& name) const {
    const std::string& text = answers.at(name);
    size_t rate = text.find('+');
    return std::stoull(text) + (rate == std::string::npos ? 0 : std::stod(text.substr(rate)) * seconds());
  }
  static double seconds() {  // since this library was first asked
    static const auto begun = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  }
};

struct State {
  std::vector<Gpu> gpus;
  std::vector<std::pair<size_t, unsigned long long>> xids;
};

struct Process {  // nvmlProcessInfo_v2_t
  unsigned pid;
  unsigned long long memory_bytes;
  unsigned gpu_instance, compute_instance;
};

struct Memory {  // nvmlMemory_t
  unsigned long long total, free, used;
};

struct Utilization {  // nvmlUtilization_t
  unsigned gpu, memory;
};

struct EventData {  // nvmlEventData_t
  void* device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};

struct FieldValue {  // nvmlFieldValue_t
  unsigned field, scope;
  long long timestamp, latency_us;
  int type, error;
  unsigned long long value;
};

std::map<std::string, std::string> answers_in(std::istringstream& words) {
  std::map<std::string, std::string> answers;
  for (std::string word; words >> word;) answers[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  return answers;
}

State read() {
  State state;
  std::ifstream file(std::getenv("STUB_NVML"));
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string kind;
    size_t index = 0;
    words >> kind;
    if (kind == "gpu") {
      state.gpus.push_back({answers_in(words), {}, {}});
      continue;
    }
    words >> index;
    if (kind == "mig") {
      state.gpus.at(index).instances.push_back({answers_in(words), {}, {}});
    } else if (kind == "process") {
      unsigned pid;
      words >> pid;
      state.gpus.at(index).pids.push_back(pid);
    } else if (kind == "xid") {
      unsigned long long number;
      words >> number;
      state.xids.push_back({index, number});
    }
  }
  return state;
}

const State& now() {
  static State state;
  static struct stat before {};
  struct stat found {};
  auto differs = [&] { return found.st_ino != before.st_ino || found.st_mtim.tv_nsec != before.st_mtim.tv_nsec; };
  if (stat(std::getenv("STUB_NVML"), &found) == 0 && differs()) {
    before = found;
    state = read();
  }
  return state;
}

void* handle_of(size_t number) { return reinterpret_cast<void*>(number + 1); }

const Gpu& of(void* handle) {
  size_t number = reinterpret_cast<size_t>(handle) - 1;
  if (number < INSTANCES) return now().gpus.at(number);
  return now().gpus.at(number / INSTANCES - 1).instances.at(number % INSTANCES);
}

void note(void* handle, const std::string& question) {
  if (const char* path = std::getenv("STUB_NVML_CALLS"))
    std::ofstream(path, std::ios::app) << of(handle).answers.at("uuid") << ' ' << question << '\n';
}

template <typename T>
int answer(void* handle, const std::string& question, T* value) {
  note(handle, question);
  const Gpu& gpu = of(handle);
  if (gpu.has("lost")) return LOST;
  if (!gpu.has(question)) return NOT_SUPPORTED;
  *value = static_cast<T>(gpu.number(question));
  return SUCCESS;
}

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) { return SUCCESS; }
int nvmlInit_v2() { return SUCCESS; }
int nvmlShutdown() { return SUCCESS; }
const char* nvmlErrorString(int error) { return error == LOST ? "GPU is lost" : "the stub's error"; }

int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::strncpy(text, "580.00", size);
  return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = now().gpus.size();
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if (index >= now().gpus.size()) return INVALID_ARGUMENT;
  if (now().gpus[index].has("lost_at_start")) return LOST;
  *handle = handle_of(index);
  return SUCCESS;
}

int nvmlDeviceGetUUID(void* handle, char* text, unsigned size) {
  std::strncpy(text, of(handle).answers.at("uuid").c_str(), size);
  return SUCCESS;
}

int nvmlDeviceGetName(void* handle, char* text, unsigned size) {
  const Gpu& gpu = of(handle);
  std::string name = gpu.has("name") ? gpu.answers.at("name") : "NVIDIA_Stub";
  std::replace(name.begin(), name.end(), '_', ' ');  // an answer has no spaces
  std::strncpy(text, name.c_str(), size);
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
  int error = answer(handle, "memory_total", &memory->total);
  if (error == SUCCESS) error = answer(handle, "memory_used", &memory->used);
  memory->free = memory->total - memory->used;
  return error;
}

int nvmlDeviceGetUtilizationRates(void* handle, Utilization* rates) {
  rates->memory = 0;
  return answer(handle, "utilization", &rates->gpu);
}

int nvmlDeviceGetPowerUsage(void* handle, unsigned* milliwatts) { return answer(handle, "power_mw", milliwatts); }

int nvmlDeviceGetTotalEnergyConsumption(void* handle, unsigned long long* millijoules) {
  return answer(handle, "energy_mj", millijoules);
}

int nvmlDeviceGetTemperature(void* handle, int, unsigned* celsius) { return answer(handle, "temperature", celsius); }

int nvmlDeviceGetClockInfo(void* handle, int kind, unsigned* mhz) {
  if (kind == SM_CLOCK) return answer(handle, "sm_clock", mhz);
  return kind == MEMORY_CLOCK ? answer(handle, "memory_clock", mhz) : INVALID_ARGUMENT;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void* handle, unsigned long long* reasons) {
  return answer(handle, "reasons", reasons);
}

#ifndef OLD_DRIVER
int nvmlDeviceGetFieldValues(void* handle, int count, FieldValue* values) {
  static const std::map<unsigned, std::string> names = {
      {3, "ecc_corrected"}, {4, "ecc_uncorrected"}, {138, "nvlink_tx_kib"}, {139, "nvlink_rx_kib"}, {197, "pcie_tx"}, {198, "pcie_rx"},
  };
  if (of(handle).has("lost")) return LOST;
  for (int place = 0; place < count; ++place) {
    auto name = names.find(values[place].field);
    bool of_links = name != names.end() && name->second.starts_with("nvlink");
    values[place].type = of(handle).has("narrow") ? UNSIGNED_INT : UNSIGNED_LONG_LONG;
    values[place].error = name == names.end() || of_links != (values[place].scope == ALL_LINKS)
                              ? INVALID_ARGUMENT
                              : answer(handle, name->second, &values[place].value);
  }
  return SUCCESS;
}
#endif

int nvmlDeviceGetMigMode(void* handle, unsigned* current, unsigned* pending) {
  *current = *pending = !of(handle).instances.empty();
  return of(handle).has("no_mig") ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void*, unsigned* count) {
  *count = 7;
  return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void* handle, unsigned place, void** instance) {
  if (place >= of(handle).instances.size()) return NOT_FOUND;
  *instance = handle_of(INSTANCES * reinterpret_cast<size_t>(handle) + place);
  return SUCCESS;
}

int nvmlEventSetCreate(void** set) {
  *set = handle_of(0);
  return SUCCESS;
}

int nvmlDeviceRegisterEvents(void* handle, unsigned long long, void*) {
  return of(handle).has("no_events") ? NOT_SUPPORTED : SUCCESS;
}

int nvmlEventSetWait_v2(void*, EventData* event, unsigned) {
  static size_t told = 0;
  if (told >= now().xids.size()) return TIMEOUT;
  auto [index, number] = now().xids[told++];
  *event = {handle_of(index), XID_EVENT, number, ~0u, ~0u};
  return SUCCESS;
}

#ifdef OLD_DRIVER
#define nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetComputeRunningProcesses_v2
#endif

int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, Process* processes) {
  if (of(handle).has("lost")) return LOST;
  const auto& pids = of(handle).pids;
  unsigned room = processes ? *count : 0;
  *count = pids.size();
  if (pids.size() > room) return INSUFFICIENT_SIZE;
  for (size_t place = 0; place < pids.size(); ++place) processes[place] = {pids[place], 1ull << 30, ~0u, ~0u};
  return SUCCESS;
}
}
