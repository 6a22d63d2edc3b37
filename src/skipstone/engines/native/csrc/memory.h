// Scratch memory, and the state of the floating-point unit while the library computes.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sk {
// Memory from a multiple of 64 bytes on: no load of 16 floats touches two cache lines. Large blocks are mapped on their own, because
// an allocator keeps what it is given back.
template <class T>
struct Aligned {
  using value_type = T;
  static constexpr std::align_val_t CACHE_LINE{64};
  static constexpr size_t LARGE = 1 << 20;  // bytes
  Aligned() = default;
  template <class U>
  Aligned(const Aligned<U>&) {}
  T* allocate(size_t count) {
    if (count > SIZE_MAX / 2 / sizeof(T)) throw std::bad_alloc();
    const size_t bytes = count * sizeof(T);
    if (bytes < LARGE) return static_cast<T*>(::operator new(bytes, CACHE_LINE));
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(at);
  }
  void deallocate(T* at, size_t count) {
    if (count * sizeof(T) < LARGE) ::operator delete(at, CACHE_LINE);
    else munmap(at, count * sizeof(T));
  }
  bool operator==(const Aligned&) const { return true; }
};

// Memory for up to as many elements as were reserved. What was in it is lost when it grows.
template <class T>
class Buffer {
 public:
  T* reserve(int64_t count) {
    needed_ = std::max(needed_, count);
    if (int64_t(held_.size()) < count) {
      free();
      held_.resize(size_t(count));
    }
    return held_.data();
  }
  T* data() { return held_.data(); }
  const T* data() const { return held_.data(); }
  // Gives the memory back if less than half of it was reserved since the last trim.
  void trim() {
    if (int64_t(held_.size()) / 2 > needed_) free();
    needed_ = 0;
  }

 private:
  void free() { std::vector<T, Aligned<T>>().swap(held_); }

  std::vector<T, Aligned<T>> held_;
  int64_t needed_ = 0;
};

// Rounding to nearest and no flushing of denormals for as long as this lives: the bits of a result depend neither on what the caller
// has set nor on the thread that computes it. The caller's own state comes back.
class PlainFloats {
 public:
#if defined(__x86_64__)
  PlainFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // the processor's state at reset
  ~PlainFloats() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  PlainFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
  }
  ~PlainFloats() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#endif
};
}  // namespace sk
