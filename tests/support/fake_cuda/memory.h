// Memory of fake GPUs: the host's memory, counted per GPU and limited if asked.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>

namespace fake_cuda {

constexpr int kMostDevices = 64;

inline int device_count() {
  const char* text = std::getenv("FAKE_CUDA_DEVICES");
  return text == nullptr ? 0 : std::atoi(text);
}

inline thread_local c10::DeviceIndex current_device = 0;

// Bytes of one GPU. Other threads, such as autograd's, allocate too.
struct Account {
  std::atomic<int64_t> in_use{0};
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> limit{INT64_MAX};
};

inline Account accounts[kMostDevices];

// Raises what torch raises when a GPU has no memory left.
inline void charge(int device, int64_t bytes) {
  Account& account = accounts[device];
  TORCH_CHECK_WITH(
      OutOfMemoryError, account.in_use + bytes <= account.limit,
      "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", device, " is a fake one.");
  const int64_t now = account.in_use += bytes;
  int64_t peak = account.peak;
  while (now > peak && !account.peak.compare_exchange_weak(peak, now)) {
  }
}

// What is needed to free a piece of GPU memory: its own host memory, or the CPU storage whose memory it shares.
struct Piece {
  int device;
  int64_t bytes;
  void* own;
  c10::Storage stands_for;
};

inline void give_back(void* context) {
  Piece* piece = static_cast<Piece*>(context);
  accounts[piece->device].in_use -= piece->bytes;
  std::free(piece->own);
  delete piece;
}

inline void* host_memory(size_t bytes) {
  void* found = nullptr;
  TORCH_CHECK(bytes == 0 || posix_memalign(&found, 64, bytes) == 0, "the host has no memory for a fake GPU");
  return found;
}

// Memory of the current GPU.
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device;
    charge(device, static_cast<int64_t>(bytes));
    void* memory = host_memory(bytes);
    return {memory, new Piece{device, static_cast<int64_t>(bytes), memory, {}}, &give_back, c10::Device(c10::kCUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

inline DeviceAllocator device_allocator;

// Pinned memory is any host memory whose address this table knows: FSDP's offload asks for each tensor whether it is pinned.
inline std::mutex pinned_mutex;
inline std::map<const char*, size_t> pinned_pieces;

inline void unpin(void* memory) {
  {
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_pieces.erase(static_cast<const char*>(memory));
  }
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const size_t least = bytes == 0 ? 1 : bytes;
    void* memory = host_memory(least);
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_pieces[static_cast<const char*>(memory)] = least;
    return {memory, memory, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

inline PinnedAllocator pinned_allocator;

inline bool is_pinned(const void* address) {
  const std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned_pieces.upper_bound(static_cast<const char*>(address));
  if (after == pinned_pieces.begin()) {
    return false;
  }
  const auto& [begin, bytes] = *--after;
  return static_cast<const char*>(address) < begin + bytes;
}

}  // namespace fake_cuda
