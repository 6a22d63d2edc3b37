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
// Allocates memory at multiples of 64 bytes, so that no load of 16 floats touches two cache lines. Large blocks are mapped one by one,
// because an allocator would keep freed memory.
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
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) {
    if (count * sizeof(T) < LARGE) ::operator delete(memory, CACHE_LINE);
    else munmap(memory, count * sizeof(T));
  }
  bool operator==(const Aligned&) const { return true; }
};

// Memory for the largest number of elements that was reserved. Growing loses the contents.
template <class T>
class Buffer {
 public:
  T* reserve(int64_t count) {
    needed_ = std::max(needed_, count);
    if (int64_t(elements_.size()) < count) {
      free();
      elements_.resize(size_t(count));
    }
    return elements_.data();
  }
  T* data() { return elements_.data(); }
  const T* data() const { return elements_.data(); }
  // Frees the memory if less than half of it was reserved since the last trim.
  void trim() {
    if (int64_t(elements_.size()) / 2 > needed_) free();
    needed_ = 0;
  }

 private:
  void free() { std::vector<T, Aligned<T>>().swap(elements_); }

  std::vector<T, Aligned<T>> elements_;
  int64_t needed_ = 0;
};

// While it lives, floats are rounded to nearest and denormals are not flushed. So results depend neither on the caller's settings nor
// on the thread. The destructor restores the caller's settings.
template <unsigned X86, uint64_t ARM>
class FloatSettings {
 public:
#if defined(__x86_64__)
  FloatSettings() : before_(_mm_getcsr()) { _mm_setcsr(X86); }
  ~FloatSettings() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  FloatSettings() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(ARM));
  }
  ~FloatSettings() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#endif
};
using PlainFloats = FloatSettings<0x1f80, 0>;  // the processor's default
// The same with denormal inputs and results as 0, as in bfloat16 products. aarch64 tests results before it rounds them: one that would be
// rounded to 2^-126 is 0 there.
using FlushedDenormals = FloatSettings<0x9fc0, 1 << 24>;
}  // namespace sk
