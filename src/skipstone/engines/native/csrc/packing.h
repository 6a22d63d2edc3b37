// Packs weights into panels, on several threads, from memory or from a file.
//
// A file is read, not mapped: its pages need no place in the page table, and a buffer of 16 rows stays in the second-level cache.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>

#include "matmul.h"
#include "model.h"
#include "pool.h"

namespace sk {
// Rows of weights. file: a descriptor, or -1 for memory. place: offset in the file, or address. stride, size: bytes from a row to the
// next one, and of a row.
struct Source {
  int64_t file;
  uintptr_t place;
  int64_t stride, size;

  // Some rows, in the buffer if they are in a file. Null if they cannot be read.
  const char* rows(int64_t first, int64_t count, char* buffer) const {
    const uintptr_t begin = place + uintptr_t(first * stride);
    if (file < 0) return reinterpret_cast<const char*>(begin);
    const int64_t bytes = (count - 1) * stride + size;
    for (int64_t done = 0; done < bytes;) {
      const ssize_t now = pread(int(file), buffer + done, size_t(bytes - done), off_t(begin) + done);
      if (now == 0 || (now < 0 && errno != EINTR)) return nullptr;
      done += std::max<ssize_t>(now, 0);
    }
    return buffer;
  }
};

// Calls make(rows, outputs, panel) for every panel of a matrix, until one call returns an error. Threads take panels one after the other,
// because another process may slow a thread.
template <class Make>
inline int64_t fill_panels(const Source& source, int64_t outputs, int64_t threads, void* panels, int64_t panel_size, const Make& make) {
  const int64_t count = (outputs + LANES - 1) / LANES, buffer_size = source.file < 0 ? 0 : LANES * source.stride + source.size;
  const auto buffers = std::make_unique_for_overwrite<char[]>(size_t(threads * buffer_size));
  std::atomic<int64_t> next{0}, error{OK};
  const int64_t step = count / (threads * 8) + 1;
  auto work = [&](int thread) {
    char* buffer = buffers.get() + thread * buffer_size;
    for (int64_t first; (first = next.fetch_add(step)) < count;)
      for (int64_t p = first; p < std::min(first + step, count); p++) {
        if (error.load(std::memory_order_relaxed) != OK) return;
        const int64_t left = outputs - p * LANES;
        const char* rows = source.rows(p * LANES, std::min<int64_t>(left, LANES), buffer);
        const int64_t code = rows == nullptr ? BAD_FILE : make(rows, left, static_cast<char*>(panels) + p * panel_size);
        if (code != OK) error = code;
      }
  };
  Pool::shared().run(int(threads), [](void* job, int thread, int, Pool&) noexcept { (*static_cast<decltype(work)*>(job))(thread); }, &work);
  return error;
}

// Packs up to 16 outputs of 16-bit weights into a panel of their own type. pairs: of inputs lie side by side.
inline void pack_panel(const uint16_t* from, int64_t stride, int64_t outputs, int64_t inputs, bool pairs, uint16_t* panel) {
  uint32_t units[LANES * LANES];
  for (int64_t k = 0; k < inputs; k += GROUP) {
    if (outputs < LANES || inputs - k < GROUP) {
      const PaddedGroup<uint16_t> padded(from + k, stride, outputs, inputs - k);
      uint16_t packed[GROUP * LANES];
      pack_panel(padded.weights[0], GROUP, LANES, GROUP, pairs, packed);
      const int64_t left = std::min<int64_t>(inputs - k, GROUP);
      std::memcpy(panel + k * LANES, packed, size_t(pairs ? left + left % 2 : left) * LANES * 2);
    } else if (pairs) {
      transpose16(reinterpret_cast<const char*>(from + k), stride * 2, reinterpret_cast<uint32_t*>(panel + k * LANES));
    } else {
      transpose16(reinterpret_cast<const char*>(from + k), stride * 2, units);
      for (int i = 0; i < LANES; i++) split_pairs(units + i * LANES, panel + (k + 2 * i) * LANES);
    }
  }
}

// Packs up to 16 outputs into a float32 panel.
template <class E>
inline void widen_panel(const E* from, int64_t stride, int64_t outputs, int64_t inputs, float* panel) {
  for (int64_t k = 0; k < inputs; k += GROUP) {
    if (inputs - k >= GROUP) {
      load_group(from + k, stride, outputs, GROUP, panel + k * LANES);
      continue;
    }
    float w[GROUP * LANES];
    load_group(from + k, stride, outputs, inputs - k, w);
    std::memcpy(panel + k * LANES, w, size_t(inputs - k) * LANES * 4);
  }
}
}  // namespace sk
