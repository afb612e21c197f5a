// A fixed team of threads that runs one function together, with a barrier inside it.
//
// The caller is thread 0. Between runs the workers spin briefly, then sleep: an idle engine uses no CPU. The barrier
// spins while every thread has a core of its own and yields otherwise, so that a team larger than the machine is
// slow but never stuck.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace ew {

// Cores this process may use: its affinity mask, cut down to the cgroup's CPU quota (v1 or v2). At least 1.
int usable_cpus();

class ThreadPool {
  public:
    // A team of `threads` (at least 1): the caller of run() and threads - 1 workers.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;
    ThreadPool &operator=(const ThreadPool &) = delete;

    int threads() const { return threads_; }

    // Calls body(thread) on every thread, returns when all have returned. Not reentrant; the body must not throw.
    template <class Body> void run(Body &body) {
        run_raw([](void *context, int thread) { (*static_cast<Body *>(context))(thread); }, &body);
    }

    // Inside a run: returns once every thread has called it as often as this one. What was written before it by any
    // thread is seen after it by all.
    void barrier();

  private:
    using Raw = void (*)(void *, int);
    void run_raw(Raw body, void *context);
    void work(int thread);
    uint32_t await_run(uint32_t seen);

    const int threads_;
    const bool oversubscribed_;
    Raw body_ = nullptr;
    void *context_ = nullptr;
    bool stop_ = false;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;

    // Each on a cache line of its own: they are written at every barrier.
    alignas(64) std::atomic<uint32_t> run_{0}; // incremented to start a run
    std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

} // namespace ew
