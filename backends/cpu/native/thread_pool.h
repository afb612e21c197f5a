// A fixed team of threads that runs one function together, with a barrier inside it.
//
// The caller is thread 0. Whoever waits, for the next run or at a barrier, spins briefly and then sleeps in the kernel: an
// idle engine uses no CPU, and a team that shares its cores with others (or has more threads than cores) gives way to the
// threads it waits for instead of taking their time.
#pragma once

#include <atomic>
#include <chrono>
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
        struct Waited {
            uint32_t count;
            bool slept;
        };
        // Returns once the count is not `seen`: it spins that long, then sleeps.
        Waited await(uint32_t seen, std::chrono::nanoseconds spin);
    };

    void run_raw(Raw body, void *context);
    void work(int thread);
    void work_once(int thread);
    void choose_patience();
    void finish();

    const int threads_;
    const bool oversubscribed_; // more threads than cores: never spin
    Raw body_ = nullptr;
    void *context_ = nullptr;
    bool stop_ = false;
    std::vector<std::thread> workers_;

    std::vector<long> preemptions_; // of each thread, all its life
    long preemptions_before_ = 0;   // of all threads, before the last run
    std::chrono::nanoseconds pause_;
    std::chrono::steady_clock::time_point patient_again_;

    Signal run_;     // raised to start a run
    Signal barrier_; // raised by the last to arrive
    alignas(64) std::atomic<int> arrived_{0};
    std::atomic<int64_t> spin_;         // nanoseconds that barriers spin
    std::atomic<bool> held_up_{false};  // this run: a patient barrier ended in sleep
};

} // namespace ew
