// A fake CUDA device for a torch that was built without CUDA. fake_cuda/__init__.py loads this library before torch.
#include "device.h"
#include "memory.h"
#include "operators.h"

namespace {

using FakeGuard = fake_cuda::Guard;
using FakeHooks = fake_cuda::Hooks;

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fake_cuda::by_host_kernel>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", fake_cuda::empty);
  library.impl("empty_strided", fake_cuda::empty_strided);
  library.impl("copy_", fake_cuda::copy);
  library.impl("resize_", fake_cuda::resize);
  library.impl("set_.source_Storage_storage_offset", fake_cuda::set_part);
  library.impl("set_.source_Storage", fake_cuda::set_whole);
  library.impl("set_.source_Tensor", fake_cuda::set_like);
  library.impl("record_stream", fake_cuda::record_stream);
}

// What the Python part asks and sets. Bytes everywhere.
TORCH_LIBRARY(fake_cuda, library) {
  library.def("in_use(int device) -> int", [](int64_t device) -> int64_t { return fake_cuda::accounts[device].in_use; });
  library.def("peak(int device) -> int", [](int64_t device) -> int64_t { return fake_cuda::accounts[device].peak; });
  library.def("reset_peak(int device) -> ()", [](int64_t device) {
    fake_cuda::accounts[device].peak = fake_cuda::accounts[device].in_use.load();
  });
  library.def("limit(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    fake_cuda::accounts[device].limit = bytes;
  });
  library.def("current_device() -> int", []() -> int64_t { return fake_cuda::current_device; });
  library.def("set_device(int device) -> ()", [](int64_t device) { fake_cuda::set_device(device); });
  library.def("host_view(Tensor tensor) -> Tensor");
  library.def("resize_storage(Tensor tensor, int bytes) -> ()");
}

TORCH_LIBRARY_IMPL(fake_cuda, CompositeExplicitAutograd, library) {
  library.impl("host_view", [](const at::Tensor& tensor) { return fake_cuda::on_gpu(tensor) ? fake_cuda::host_view(tensor) : tensor; });
  library.impl("resize_storage", [](const at::Tensor& tensor, int64_t bytes) { fake_cuda::resize_storage(tensor.storage(), bytes); });
}

}  // namespace

namespace c10d {
using FakeTimer = fake_cuda::Timer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, FakeTimer)
}  // namespace c10d
