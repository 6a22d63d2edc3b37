// Threads that run one job together, with barriers inside it.
//
// Between jobs a worker spins for a while and then sleeps, until a job needs it. Inside a job a barrier spins, then yields: two
// threads on one core must not burn each other's time slices. A caller sends a worker that was last seen on its own core to
// another one: beside a running caller the worker would not even run to notice. Where another process holds a core, every
// barrier would wait for its time slice: a caller that had to wait long runs its next jobs alone for as long as it waited, and for
// twice as long each time that it then has to wait again, until trying costs next to nothing.
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

  static constexpr int64_t LONG_WAIT = 300'000;  // nanoseconds of yielding in one job that may mean a core is taken,
  static constexpr double LONG_SHARE = 0.4;      // and do where they are more than this share of the job's time
  static constexpr int64_t MOST_ALONE = 32;      // times the long wait that jobs run without workers, after many in a row
  static constexpr int64_t CALM_FOR = 16;        // times the long wait without another one after which they are no longer in a row

  // A job must not throw: the other threads would wait for its thread for ever.
  using Job = void (*)(void* context, int thread, int threads, Pool& pool) noexcept;

  static Pool& shared() {
    static const bool made = [] {
      only_ = new Pool;  // never destroyed: workers may outlive static destruction
      return pthread_atfork(nullptr, nullptr, [] { new (only_) Pool; }) == 0;  // a fork copies this object and none of its threads
    }();
    if (!made) throw std::bad_alloc();
    return *only_;
  }

  // Runs job(context, t, T, pool) for t in [0, T) and waits for all. Another caller's job in progress: T is 1.
  void run(int threads, Job job, void* context) {
    std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (threads <= 1 || !mine.owns_lock() || nanoseconds() < alone_until_) {
      Pool alone;
      job(context, 0, 1, alone);
      return;
    }
    while (int(workers_.size()) < threads - 1) start_worker();
    threads_ = threads;
    job_ = job;
    context_ = context;
    const int core = sched_getcpu();
    bool woken = false;
    for (int i = 0; i < threads - 1; i++) {
      Worker& worker = *workers_[size_t(i)];
      if (core >= 0 && worker.core.load(std::memory_order_relaxed) == core) worker.leave(core);
      worker.jobs.fetch_add(1, std::memory_order_seq_cst);
      if (worker.asleep.load(std::memory_order_seq_cst)) {
        worker.jobs.notify_one();
        woken = true;
      }
    }
    waited_ = 0;
    const int64_t start = nanoseconds();
    job(context, 0, threads, *this);
    barrier(true);
    const int64_t now = nanoseconds();
    if (woken) {  // to wake up takes long on a free core, too: only the next job tells
      unjudged_ = waited_;
      return;
    }
    if (waited_ > LONG_WAIT && double(waited_) > LONG_SHARE * double(now - start)) {
      const int64_t wait = unjudged_ + waited_;
      alone_until_ = now + alone_for_ * wait;
      calm_from_ = alone_until_ + CALM_FOR * wait;
      alone_for_ = std::min(2 * alone_for_, MOST_ALONE);
    } else if (now > calm_from_) {
      alone_for_ = 1;
    }
    unjudged_ = 0;
  }

  // Waits until every thread of the job is here. caller: the thread that called `run`, whose waiting is timed.
  void barrier(bool caller = false) {
    const int threads = threads_;  // read before this thread is counted: the next job may change it from then on
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
    std::atomic<uint32_t> jobs{0};  // that it was called for
    std::atomic<bool> asleep{false};
    std::atomic<int> core{-1};  // where it ended its last job; -1: unknown
    std::atomic<bool> known{false};  // whether `thread` and `allowed` are set
    pthread_t thread;
    cpu_set_t allowed;  // cores that it may use
    cpu_set_t sent;     // where `leave` has sent it last; none at first

    // Sends the worker to any core but this one, where there is another. It stays off it until it is sent off another one.
    void leave(int taken) {
      if (!known.load(std::memory_order_acquire)) return;
      cpu_set_t now;
      if (pthread_getaffinity_np(thread, sizeof now, &now) != 0) return;
      if (!CPU_EQUAL(&now, &sent)) allowed = now;  // somebody else has said since where it may run
      cpu_set_t others = allowed;
      CPU_CLR(taken, &others);
      if (CPU_COUNT(&others) && pthread_setaffinity_np(thread, sizeof others, &others) == 0) sent = others;
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
    CPU_ZERO(&own.sent);
    own.known.store(sched_getaffinity(0, sizeof own.allowed, &own.allowed) == 0, std::memory_order_release);
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

  static inline Pool* only_ = nullptr;
  std::mutex busy_;
  std::vector<Worker*> workers_;  // never freed: their threads outlive this object
  int threads_ = 1;
  int64_t waited_ = 0;  // nanoseconds that the caller has yielded in this job
  int64_t unjudged_ = 0;  // and in the job before it, where that woke a worker
  int64_t alone_for_ = 1;  // times the next long wait
  int64_t calm_from_ = 0;  // nanoseconds of the clock
  std::atomic<int64_t> alone_until_{0};  // nanoseconds of the clock: jobs run without workers until then
  Job job_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
};
}  // namespace sk
