// Threads that run one job together, with barriers inside it.
//
// Between jobs a worker spins for a while and then sleeps until a job needs it. Inside a job a barrier spins, then yields, because two
// threads on one core must not use up each other's time slices. If a worker was last seen on the caller's core, the caller moves it to
// another core. While the caller runs, the worker would get no time there.
//
// If another process holds a core, every barrier waits for the end of its time slice. Then jobs leave out threads, see `ThreadLimit`.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "memory.h"

namespace sk {
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield");
#endif
}

// Counts the threads that jobs leave out. If jobs waited for threads in much of a WINDOW, one more is left out. It comes back after
// PAUSE, and each further one in half the time of the last. So all are back within twice PAUSE.
class ThreadLimit {
 public:
  static constexpr int64_t WINDOW = 10'000'000;  // nanoseconds of jobs. One time slice or wake-up must not be much of it
  static constexpr double LONG_SHARE = 0.4;      // of a window: a process that shares a core takes half of it
  static constexpr int64_t PAUSE = 200'000'000;  // nanoseconds

  // The number of threads at a time, for a job that may have `threads`.
  int limited(int threads, int64_t now) {
    while (num_left_out_ > 0 && now >= pause_end_) {
      num_left_out_--;
      pause_ /= 2;
      pause_end_ += pause_;
    }
    return std::max(1, threads - num_left_out_);
  }

  // Counts a job from `start` to `now` that waited so long for threads.
  void add_job(int64_t start, int64_t now, int64_t waited) {
    window_ += now - start;
    waited_ += waited;
    if (window_ < WINDOW) return;
    if (double(waited_) > LONG_SHARE * double(window_)) {
      num_left_out_++;
      pause_ = PAUSE;
      pause_end_ = now + PAUSE;
    }
    window_ = waited_ = 0;
  }

 private:
  int num_left_out_ = 0;
  int64_t pause_ = 0, pause_end_ = 0;
  int64_t window_ = 0, waited_ = 0;  // of the jobs since the last window
};

class Pool {
 public:
  static constexpr int SPINS_AT_BARRIER = 2000;   // pauses before a waiting thread yields its core
  static constexpr int SPINS_BETWEEN_JOBS = 20000;  // pauses before a worker goes to sleep

  // A job must not throw, because the other threads would wait forever.
  using Job = void (*)(void* context, int thread, int threads, Pool& pool) noexcept;

  static Pool& shared() {
    static const bool is_made = [] {
      shared_ = new Pool;  // never destroyed: workers may outlive static destruction
      return pthread_atfork(nullptr, nullptr, [] { new (shared_) Pool; }) == 0;  // a forked process has none of the threads
    }();
    if (!is_made) throw std::bad_alloc();
    return *shared_;
  }

  // Runs job(context, t, T, pool) for t in [0, T) and waits for all. T <= threads. It is 1 while another caller's job has the workers.
  void run(int threads, Job job, void* context) {
    std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
    if (threads > 1) threads = lock.try_lock() ? limit_.limited(threads, nanoseconds()) : 1;
    if (threads <= 1) {
      if (lock) lock.unlock();
      Pool alone;
      job(context, 0, 1, alone);
      return;
    }
    while (int(workers_.size()) < threads - 1) start_worker();
    threads_ = threads;
    job_ = job;
    context_ = context;
    const int core = sched_getcpu();
    for (int i = 0; i < threads - 1; i++) {
      Worker& worker = *workers_[size_t(i)];
      if (core >= 0 && worker.core.load(std::memory_order_relaxed) == core) worker.move_off(core);
      worker.jobs.fetch_add(1, std::memory_order_seq_cst);
      if (worker.asleep.load(std::memory_order_seq_cst)) worker.jobs.notify_one();
    }
    const int64_t start = nanoseconds();
    job(context, 0, threads, *this);
    barrier(0);
    const int64_t waited = std::max(waited_[0].exchange(0, std::memory_order_relaxed), waited_[1].exchange(0, std::memory_order_relaxed));
    limit_.add_job(start, nanoseconds(), waited);
  }

  // Waits for all threads of the job. The waits of threads 0 and 1 are timed: one of them waits for any thread that is late. If thread 1
  // waits at the end of a job, the wait counts in the next job.
  void barrier(int thread) {
    const int threads = threads_;  // read before this thread is counted: afterwards the next job may change it
    if (threads == 1) return;
    const int generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int i = 0; i < SPINS_AT_BARRIER; i++) {
      if (generation_.load(std::memory_order_acquire) != generation) return;
      relax();
    }
    const int64_t start = nanoseconds();
    while (generation_.load(std::memory_order_acquire) == generation) sched_yield();
    if (thread < 2) waited_[thread].fetch_add(nanoseconds() - start, std::memory_order_relaxed);
  }

 private:
  struct alignas(64) Worker {
    std::atomic<uint32_t> jobs{0};  // number of jobs it was called for
    std::atomic<bool> asleep{false};
    std::atomic<int> core{-1};  // of its last job; -1: unknown
    std::atomic<bool> is_known{false};  // whether `thread` and `allowed` are set
    pthread_t thread;
    cpu_set_t allowed;  // cores that it may use
    cpu_set_t last_sent;  // the latest cores set by `move_off`; none at first

    // Moves the worker off a core if it may use others. It stays off until it is moved off another core.
    void move_off(int taken) {
      if (!is_known.load(std::memory_order_acquire)) return;
      cpu_set_t now;
      if (pthread_getaffinity_np(thread, sizeof now, &now) != 0) return;
      if (!CPU_EQUAL(&now, &last_sent)) allowed = now;  // changed from outside meanwhile
      cpu_set_t others = allowed;
      CPU_CLR(taken, &others);
      if (CPU_COUNT(&others) && pthread_setaffinity_np(thread, sizeof others, &others) == 0) last_sent = others;
      core.store(-1, std::memory_order_relaxed);
    }
  };

  static int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  void start_worker() {
    const int index = int(workers_.size()) + 1;
    workers_.reserve(size_t(index));
    auto worker = std::make_unique<Worker>();
    std::thread([this, index, own = worker.get()] { work(index, *own); }).detach();
    workers_.push_back(worker.release());
  }

  void work(int index, Worker& own) {
    const PlainFloats plain;
    own.thread = pthread_self();
    CPU_ZERO(&own.last_sent);
    own.is_known.store(sched_getaffinity(0, sizeof own.allowed, &own.allowed) == 0, std::memory_order_release);
    for (uint32_t done = 0;; done++) {
      own.core.store(sched_getcpu(), std::memory_order_relaxed);
      for (int i = 0; own.jobs.load(std::memory_order_acquire) == done; i++) {
        if (i < SPINS_BETWEEN_JOBS) { relax(); continue; }
        own.asleep.store(true, std::memory_order_seq_cst);
        own.jobs.wait(done);
        own.asleep.store(false, std::memory_order_relaxed);
      }
      job_(context_, index, threads_, *this);
      barrier(index);
    }
  }

  static inline Pool* shared_ = nullptr;
  std::mutex busy_;
  std::vector<Worker*> workers_;  // never freed: their threads outlive this object
  int threads_ = 1;
  ThreadLimit limit_;
  std::atomic<int64_t> waited_[2] = {0, 0};  // nanoseconds that threads 0 and 1 yielded since the last job's end
  Job job_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
};
}  // namespace sk
