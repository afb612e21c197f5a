#include "thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

namespace ew {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kBarrierSpins = 2000; // some tens of microseconds

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

bool read_numbers(const std::string &path, double &quota, double &period) {
    std::ifstream file(path);
    std::string first;
    if (!(file >> first >> period) || first == "max")
        return false;
    quota = std::atof(first.c_str());
    return quota > 0 && period > 0;
}

bool read_number(const std::string &path, double &value) {
    std::ifstream file(path);
    return bool(file >> value);
}

// The smallest quota, in cores, along this process's cgroup path; 0 where there is none.
double cgroup_quota() {
    double best = 0;
    auto consider = [&](double quota, double period) {
        if (quota > 0 && period > 0 && (best == 0 || quota / period < best))
            best = quota / period;
    };
    std::ifstream groups("/proc/self/cgroup");
    std::string line;
    while (std::getline(groups, line)) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos)
            continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        std::string path = line.substr(second + 1);
        const bool v2 = controllers.empty();
        if (!v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos)
            continue;
        const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
        while (true) { // from the process's own group up to the root, which inside a container is the group itself
            const std::string folder = root + (path == "/" ? "" : path);
            double quota = 0, period = 0;
            if (v2) {
                if (read_numbers(folder + "/cpu.max", quota, period))
                    consider(quota, period);
            } else if (read_number(folder + "/cpu.cfs_quota_us", quota) &&
                       read_number(folder + "/cpu.cfs_period_us", period)) {
                consider(quota, period);
            }
            if (path.empty() || path == "/")
                break;
            path = path.substr(0, path.rfind('/'));
            if (path.empty())
                path = "/";
        }
    }
    return best;
}

} // namespace

int usable_cpus() {
    int count = int(std::thread::hardware_concurrency());
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        count = CPU_COUNT(&set);
    const double quota = cgroup_quota();
    if (quota > 0)
        count = std::min(count, int(quota + 0.5));
    return std::max(count, 1);
}

ThreadPool::ThreadPool(int threads) : threads_(std::max(threads, 1)), oversubscribed_(threads_ > usable_cpus()) {
    try {
        for (int thread = 1; thread < threads_; ++thread)
            workers_.emplace_back([this, thread] { work(thread); });
    } catch (...) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
            run_.fetch_add(1);
        }
        wake_.notify_all();
        for (auto &worker : workers_)
            worker.join();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        run_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto &worker : workers_)
        worker.join();
}

void ThreadPool::run_raw(Raw body, void *context) {
    if (threads_ == 1)
        return body(context, 0);
    body_ = body;
    context_ = context;
    run_.fetch_add(1); // sequentially consistent, as is the sleepers' count: one of the two sides sees the other
    if (sleepers_.load() > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    body(context, 0);
    barrier();
}

// Waits for a run other than `seen`; spins first, then sleeps.
uint32_t ThreadPool::await_run(uint32_t seen) {
    uint32_t now = run_.load(std::memory_order_acquire);
    if (now != seen)
        return now;
    if (!oversubscribed_) {
        const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
        do {
            for (int i = 0; i < 64; ++i) {
                pause();
                if ((now = run_.load(std::memory_order_acquire)) != seen)
                    return now;
            }
        } while (std::chrono::steady_clock::now() < deadline);
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return (now = run_.load()) != seen; });
    sleepers_.fetch_sub(1);
    return now;
}

void ThreadPool::work(int thread) {
    uint32_t seen = 0;
    while (true) {
        seen = await_run(seen);
        if (stop_)
            return;
        body_(context_, thread);
        barrier();
    }
}

void ThreadPool::barrier() {
    if (threads_ == 1)
        return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    int spins = oversubscribed_ ? 0 : kBarrierSpins;
    while (phase_.load(std::memory_order_acquire) == phase) {
        if (spins > 0) {
            --spins;
            pause();
        } else {
            std::this_thread::yield();
        }
    }
}

} // namespace ew
