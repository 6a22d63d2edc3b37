// Threads that run one job together, with barriers inside it.
//
// Between jobs a worker spins for a while and then sleeps until a job needs it. Inside a job a barrier spins, then yields, because two
// threads on one core must not use up each other's time slices. If a worker was last seen on the caller's core, the caller moves it to
// another core. While the caller runs, the worker would get no time there.
//
// If another process holds a core, every barrier waits for the end of its time slice. If the caller waited for much of a job, its next
// jobs therefore have one thread fewer, for a pause. Then they have up to twice as many, and all if no wait is long for CALM. A long wait
// before that makes a pause twice the last one, so that trials cost little. Else a pause is as long as the wait.
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

class Pool {
 public:
  static constexpr int SPINS_AT_BARRIER = 2000;   // pauses before a waiting thread yields its core
  static constexpr int SPINS_BETWEEN_JOBS = 20000;  // pauses before a worker goes to sleep

  // Nanoseconds.
  static constexpr int64_t LONG_WAIT = 300'000;  // minimum time that the caller yields in a disturbed job
  static constexpr double LONG_SHARE = 0.4;  // minimum share of the job's time, likewise
  static constexpr int64_t MAX_PAUSE = 250'000'000;
  static constexpr int64_t CALM = 50'000'000;  // several time slices of the scheduler

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
    if (threads > 1) threads = lock.try_lock() ? limited(threads) : 1;
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
    waited_ = 0;
    const int64_t start = nanoseconds();
    job(context, 0, threads, *this);
    barrier(true);
    const int64_t now = nanoseconds();
    if (waited_ > LONG_WAIT && double(waited_) > LONG_SHARE * double(now - start)) {
      fewer_threads_ = threads - 1;
      pause_ = std::min(now < calm_from_ ? 2 * pause_ : waited_, MAX_PAUSE);
      trial_from_ = now + pause_;
      calm_from_ = trial_from_ + CALM;
    }
  }

  // Waits for all threads of the job. caller: this thread called `run`, and its waiting is timed.
  void barrier(bool caller = false) {
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
    if (caller) waited_ += nanoseconds() - start;
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

  // The number of threads that a job has now, of those it may have.
  int limited(int threads) const {
    const int64_t now = nanoseconds();
    return std::min(threads, now < trial_from_ ? fewer_threads_ : now < calm_from_ ? 2 * fewer_threads_ : threads);
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
      barrier();
    }
  }

  static inline Pool* shared_ = nullptr;
  std::mutex busy_;
  std::vector<Worker*> workers_;  // never freed: their threads outlive this object
  int threads_ = 1;
  int64_t waited_ = 0;  // nanoseconds that the caller yielded in this job
  int fewer_threads_ = 1;  // of a job before `trial_from_`
  int64_t pause_ = 0;  // the last one, in nanoseconds
  int64_t trial_from_ = 0, calm_from_ = 0;  // nanoseconds of the clock
  Job job_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
};
}  // namespace sk
