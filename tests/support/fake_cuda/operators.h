// Operators on tensors of fake GPUs: the CPU's kernels, on the same memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>
#include <utility>
#include <vector>

#include "memory.h"

namespace fake_cuda {

inline bool on_gpu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_cuda(); }

// A tensor of another device on this storage, with the sizes, strides and dtype of `like`.
inline at::Tensor tensor_on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The CPU's view of a GPU's tensor: the same memory, which stays as long as the view does.
inline at::Tensor host_view(const at::Tensor& tensor) {
  c10::Storage storage = tensor.storage();
  auto* kept = new c10::Storage(storage);
  c10::DataPtr data(storage.mutable_data(), kept, [](void* it) { delete static_cast<c10::Storage*>(it); }, c10::Device(c10::kCPU));
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
  return tensor_on(std::move(host), c10::DispatchKey::CPU, tensor);
}

// A GPU's tensor on the memory of what a CPU kernel made; the GPU is charged for it.
inline at::Tensor adopted(const at::Tensor& tensor, int device) {
  c10::Storage storage = tensor.storage();
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  charge(device, bytes);
  auto* piece = new Piece{device, bytes, nullptr, storage};
  c10::DataPtr data(storage.mutable_data(), piece, &give_back, c10::Device(c10::kCUDA, device));
  c10::Storage cuda(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), &device_allocator, true);
  return tensor_on(std::move(cuda), c10::DispatchKey::CUDA, tensor);
}

// The tensors of one call of an operator: each GPU tensor beside its host view.
class Call {
 public:
  // An argument as the CPU's kernel takes it.
  at::Tensor to_host(const at::Tensor& tensor) {
    if (!on_gpu(tensor)) {
      return tensor;
    }
    note(tensor.device());
    for (const auto& [gpu, host] : views_) {
      if (gpu.is_same(tensor)) {
        return host;
      }
    }
    return views_.emplace_back(tensor, host_view(tensor)).second;
  }

  void note(c10::Device device) {
    if (device_ < 0) {
      device_ = device.index() < 0 ? current_device : device.index();
    }
  }

  // After the call: an out= tensor whose host view got other memory, because it was too small, gets it too.
  void follow_resized() {
    for (auto& [gpu, host] : views_) {
      if (host.storage().data() != gpu.storage().data()) {
        auto* impl = gpu.unsafeGetTensorImpl();
        impl->set_storage_keep_dtype(adopted(host, device()).storage());
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      }
    }
  }

  // A result as the caller gets it: an argument itself, a view of an argument, or new memory of the GPU.
  at::Tensor to_gpu(const at::Tensor& result) const {
    if (!result.defined() || !result.device().is_cpu()) {
      return result;
    }
    for (const auto& [gpu, host] : views_) {
      if (host.is_same(result)) {
        if (!gpu.sizes().equals(result.sizes())) {
          gpu.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
        }
        return gpu;
      }
    }
    for (const auto& [gpu, host] : views_) {
      if (host.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        return tensor_on(gpu.storage(), c10::DispatchKey::CUDA, result);
      }
    }
    return adopted(result, device());
  }

 private:
  int device() const { return device_ < 0 ? current_device : device_; }

  std::vector<std::pair<at::Tensor, at::Tensor>> views_;
  int device_ = -1;
};

template <typename Change>
inline void change_tensors(c10::IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      changed.push_back(change(tensor));
    }
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      changed.push_back(tensor ? std::optional(change(*tensor)) : tensor);
    }
    value = changed;
  }
}

// torch has no kernel for bf16 of these operators on a GPU, but has one on a CPU.
inline void refuse_bf16(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (op.schema().name() != "aten::_amp_foreach_non_finite_check_and_unscale_") {
    return;
  }
  for (const at::Tensor& tensor : stack[stack.size() - op.schema().arguments().size()].toTensorVector()) {
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.scalar_type() != at::kBFloat16, op.schema().name(), " not implemented for 'BFloat16'");
  }
}

// Any operator that has no kernel of its own below.
inline void by_host_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_bf16(op, *stack);
  Call call;
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t place = first; place < stack->size(); ++place) {
    c10::IValue& value = (*stack)[place];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      call.note(value.toDevice());
      value = c10::Device(c10::kCPU);
    } else {
      change_tensors(value, [&](const at::Tensor& tensor) { return call.to_host(tensor); });
    }
  }
  op.callBoxed(stack);
  call.follow_resized();
  for (size_t place = stack->size() - op.schema().returns().size(); place < stack->size(); ++place) {
    change_tensors((*stack)[place], [&](const at::Tensor& tensor) { return call.to_gpu(tensor); });
  }
}

// For as long as it lives, the current GPU is that of a call that may name one.
class OnDevice {
 public:
  explicit OnDevice(std::optional<at::Device> device) : before_(current_device) {
    if (device && device->index() >= 0) {
      current_device = device->index();
    }
  }
  ~OnDevice() { current_device = before_; }

 private:
  c10::DeviceIndex before_;
};

inline at::ScalarType given_or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

inline at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice there(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), given_or_default(dtype), format);
}

inline at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const OnDevice there(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), given_or_default(dtype));
}

inline at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool) {
  at::Tensor there = on_gpu(to) ? host_view(to) : to;
  there.copy_(on_gpu(from) ? host_view(from) : from);
  return to;
}

inline void resize_storage(const c10::Storage& storage, int64_t bytes) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const OnDevice there(impl->device());
  c10::DataPtr fresh = device_allocator.allocate(static_cast<size_t>(bytes));
  const size_t common = std::min(static_cast<size_t>(bytes), impl->nbytes());
  if (common > 0) {
    std::memcpy(fresh.get(), impl->data(), common);
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(static_cast<size_t>(bytes));
}

inline const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const int64_t needed = (self.numel() + self.storage_offset()) * static_cast<int64_t>(self.element_size());
  if (needed > static_cast<int64_t>(self.storage().nbytes())) {
    resize_storage(self.storage(), needed);
  }
  return self;
}

inline at::Tensor& set_part(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  const int64_t begin = offset.guard_int(__FILE__, __LINE__);
  if (sizes.size() == strides.size()) {
    impl->set_sizes_and_strides(sizes, strides, begin);
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(begin);
  }
  return self;
}

inline at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto elements = static_cast<int64_t>(source.nbytes() / self.element_size());
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_contiguous({elements});
  impl->set_storage_offset(0);
  return self;
}

inline at::Tensor& set_like(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

inline void record_stream(at::Tensor&, at::Stream) {}

}  // namespace fake_cuda
