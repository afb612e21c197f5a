// A fixed team of threads that runs one function together, with a barrier inside it.
//
// The caller is thread 0. Whoever waits, for the next run or at a barrier, spins briefly and then sleeps in the kernel: an
// idle engine uses no CPU, and a team that shares its cores with others (or has more threads than cores) gives way to the
// threads it waits for instead of taking their time.
#pragma once

#include <atomic>
#include <cstdint>
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

    // A number that only grows, and those who wait until it does. Each has a cache line of its own.
    struct alignas(64) Signal {
        std::atomic<uint32_t> count{0};
        std::atomic<int> sleepers{0};

        void raise();
        // Returns the count once it is not `seen`. Spins at most `spins` times; true in `slept` where it slept.
        uint32_t await(uint32_t seen, int spins, bool &slept);
    };

    void run_raw(Raw body, void *context);
    void work(int thread);
    void finish();

    const int threads_;
    const int most_spins_; // 0 where threads outnumber cores
    Raw body_ = nullptr;
    void *context_ = nullptr;
    bool stop_ = false;
    std::vector<std::thread> workers_;

    Signal run_;     // raised to start a run
    Signal barrier_; // raised by the last to arrive
    alignas(64) std::atomic<int> arrived_{0};
    std::atomic<int> spins_; // how long barriers spin: less after a wait that ended in sleep, more after one that did not
};

} // namespace ew
