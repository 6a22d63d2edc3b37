// Threads that run one job together, with barriers inside it.
//
// Between jobs a worker spins for a while and then sleeps. Inside a job a barrier spins, then yields: two threads on one core
// must not burn each other's time slices. A worker that finds itself on its caller's core moves away from it.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

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
  static constexpr uint32_t MOST_THREADS = 256;     // threads of a job stay below
  static constexpr int SPINS_AT_BARRIER = 2000;   // pauses before a waiting thread yields its core
  static constexpr int SPINS_BETWEEN_JOBS = 20000;  // pauses before a worker goes to sleep

  using Job = void (*)(void* context, int thread, int threads, Pool& pool);

  static Pool& shared() {
    static Pool* pool = new Pool;  // never destroyed: workers may outlive static destruction
    return *pool;
  }

  // Runs job(context, t, T, pool) for t in [0, T) and waits for all. Another caller's job in progress: T is 1.
  void run(int threads, Job job, void* context) {
    std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (threads <= 1 || !mine.owns_lock()) {
      Pool alone;
      job(context, 0, 1, alone);
      return;
    }
    if (getpid() != owner_) forget_workers();  // a fork has copied this object but not its threads
    while (int(workers_.size()) < threads - 1) start_worker();
    threads_ = threads;
    job_ = job;
    context_ = context;
    caller_core_.store(sched_getcpu(), std::memory_order_relaxed);
    const uint32_t next = (call_.load(std::memory_order_relaxed) / MOST_THREADS + 1) * MOST_THREADS + uint32_t(threads);
    call_.store(next, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) call_.notify_all();
    job(context, 0, threads, *this);
    barrier();
  }

  // Waits until every thread of the job is here.
  void barrier() {
    const int threads = threads_;  // read before this thread is counted: the next job may change it from then on
    if (threads == 1) return;
    const int generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int i = 0; generation_.load(std::memory_order_acquire) == generation; i++) {
      if (i < SPINS_AT_BARRIER) relax(); else sched_yield();
    }
  }

 private:
  void start_worker() {
    const int index = int(workers_.size()) + 1;
    const uint32_t seen = call_.load(std::memory_order_relaxed);
    workers_.emplace_back(new std::thread([this, index, seen] { work(index, seen); }));
  }

  void work(int index, uint32_t seen) {
    cpu_set_t allowed;
    const bool known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
    for (;;) {
      for (int i = 0; call_.load(std::memory_order_acquire) == seen; i++) {
        if (i < SPINS_BETWEEN_JOBS) { relax(); continue; }
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        call_.wait(seen);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
      seen = call_.load(std::memory_order_acquire);
      if (index >= int(seen % MOST_THREADS)) continue;  // a job of fewer threads
      const int core = caller_core_.load(std::memory_order_relaxed);
      if (known && core >= 0 && sched_getcpu() == core) {
        cpu_set_t others = allowed;
        CPU_CLR(core, &others);
        if (CPU_COUNT(&others)) sched_setaffinity(0, sizeof others, &others);
      }
      job_(context_, index, int(seen % MOST_THREADS), *this);
      barrier();
    }
  }

  void forget_workers() {
    for (auto* worker : workers_) (void)worker;  // their threads do not exist in this process: never joined, never freed
    workers_.clear();
    arrived_.store(0);
    sleepers_.store(0);
    owner_ = getpid();
  }

  std::mutex busy_;
  std::vector<std::thread*> workers_;
  pid_t owner_ = getpid();
  int threads_ = 1;
  Job job_ = nullptr;
  void* context_ = nullptr;
  std::atomic<int> caller_core_{-1};
  alignas(64) std::atomic<uint32_t> call_{0};  // number of the job * MOST_THREADS + its threads
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
};
}  // namespace sk
