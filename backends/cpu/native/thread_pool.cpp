#include "thread_pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <string>

namespace ew {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::nanoseconds;

constexpr nanoseconds kIdleSpin = microseconds(50); // between runs

// At a barrier. A team that has its cores for itself should spin for longer than a sleeper takes to wake up (up to 100 us on
// a virtual machine): else two threads that woke up late keep sending each other to sleep. A team that shares its cores
// should not spin at all, since it would keep a core from the thread it waits for: measured with one busy stranger on two
// cores, steps of 1.6 ms take 6 ms when waiting is sleeping and 80 to 190 ms when it is spinning.
constexpr nanoseconds kPatient = microseconds(300), kImpatient = microseconds(2);
// After a run that was held up because a thread lost its core, barriers stay impatient for so long; twice as long each time
// that trying again fails.
constexpr nanoseconds kFirstPause = std::chrono::milliseconds(20), kLongestPause = std::chrono::seconds(1);

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

long futex(std::atomic<uint32_t> &word, int operation, int value) {
    static_assert(sizeof(word) == 4, "a futex is 32 bits");
    return syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), operation, value, nullptr, nullptr, 0);
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

ThreadPool::ThreadPool(int threads)
    : threads_(std::max(threads, 1)), oversubscribed_(threads_ > usable_cpus()), preemptions_(size_t(threads_)),
      pause_(kFirstPause), spin_(kPatient.count()) {
    try {
        for (int thread = 1; thread < threads_; ++thread)
            workers_.emplace_back([this, thread] { work(thread); });
    } catch (...) {
        finish();
        throw;
    }
}

ThreadPool::~ThreadPool() { finish(); }

void ThreadPool::finish() {
    stop_ = true;
    run_.raise();
    for (auto &worker : workers_)
        worker.join();
}

void ThreadPool::Signal::raise() {
    count.fetch_add(1);      // sequentially consistent, as is the sleepers' count: either the waiter sees this count
    if (sleepers.load() > 0) // before it sleeps, or it is seen here
        futex(count, FUTEX_WAKE_PRIVATE, INT_MAX);
}

ThreadPool::Signal::Waited ThreadPool::Signal::await(uint32_t seen, nanoseconds spin) {
    uint32_t now;
    if ((now = count.load(std::memory_order_acquire)) != seen)
        return {now, false};
    for (const auto deadline = Clock::now() + spin; spin.count() > 0 && Clock::now() < deadline;)
        for (int i = 0; i < 16; ++i) {
            pause();
            if ((now = count.load(std::memory_order_acquire)) != seen)
                return {now, false};
        }
    sleepers.fetch_add(1);
    while ((now = count.load()) == seen)
        futex(count, FUTEX_WAIT_PRIVATE, int(seen));
    sleepers.fetch_sub(1);
    return {now, true};
}

void ThreadPool::run_raw(Raw body, void *context) {
    if (threads_ == 1)
        return body(context, 0);
    choose_patience();
    body_ = body;
    context_ = context;
    run_.raise();
    work_once(0);
}

void ThreadPool::work_once(int thread) {
    body_(context_, thread);
    // How often this thread has lost its core so far. Only the owner writes its entry; the barrier shows it to thread 0.
    rusage usage;
    if (!oversubscribed_ && getrusage(RUSAGE_THREAD, &usage) == 0)
        preemptions_[size_t(thread)] = usage.ru_nivcsw;
    barrier();
}

void ThreadPool::work(int thread) {
    uint32_t seen = 0;
    while (true) {
        seen = run_.await(seen, oversubscribed_ ? nanoseconds(0) : kIdleSpin).count;
        if (stop_)
            return;
        work_once(thread);
    }
}

// Before a run, on thread 0: how long its barriers spin.
void ThreadPool::choose_patience() {
    if (oversubscribed_)
        return;
    long preemptions = 0;
    for (const long count : preemptions_)
        preemptions += count;
    const bool lost_core = preemptions != preemptions_before_, held_up = held_up_.load(std::memory_order_relaxed);
    preemptions_before_ = preemptions;
    if (held_up) {
        held_up_.store(false, std::memory_order_relaxed);
        if (lost_core) {
            patient_again_ = Clock::now() + pause_;
            pause_ = std::min(2 * pause_, kLongestPause);
            return; // impatient, as the barrier that was held up left it
        }
    } else if (spin_.load(std::memory_order_relaxed) == kPatient.count()) {
        pause_ = kFirstPause;
        return;
    } else if (Clock::now() < patient_again_) {
        return;
    }
    spin_.store(kPatient.count(), std::memory_order_relaxed);
}

void ThreadPool::barrier() {
    if (threads_ == 1)
        return;
    const uint32_t phase = barrier_.count.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        return barrier_.raise();
    }
    const nanoseconds spin(oversubscribed_ ? 0 : spin_.load(std::memory_order_relaxed));
    if (barrier_.await(phase, spin).slept && spin == kPatient) {
        held_up_.store(true, std::memory_order_relaxed);
        spin_.store(kImpatient.count(), std::memory_order_relaxed); // for the rest of this run, at least
    }
}

} // namespace ew
