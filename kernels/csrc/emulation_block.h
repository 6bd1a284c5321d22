// Runs a grid on the CPU: blocks one after another, the threads of a block as fibers that change places at barriers and
// warp exchanges only. Owns barriers, exchanges, deadlocks and the launch. Not here: the names CUDA gives these things
// (emulation.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "emulation_fault.h"
#include "emulation_fiber.h"
#include "emulation_order.h"
#include "emulation_shared.h"

#pragma GCC visibility push(hidden)
namespace stoker::emulation {

constexpr unsigned kWarp = 32;
constexpr size_t kMaxDynamicShared = 227 * 1024;  // per block, Hopper

// Where a thread waits: the name of the call and its line.
struct Site {
    const char* call = nullptr;
    const char* file = nullptr;
    int line = 0;

    bool operator==(const Site& other) const {
        return line == other.line && call == other.call && (file == other.file || std::strcmp(file, other.file) == 0);
    }
    std::string text() const {
        const char* slash = std::strrchr(file, '/');
        return std::string(call) + " (" + (slash != nullptr ? slash + 1 : file) + ":" + std::to_string(line) + ")";
    }
};

enum class State : uint8_t { ready, at_barrier, at_exchange, returned };

struct Thread {
    Fiber fiber;
    uint3 index{};
    unsigned linear = 0;
    State state = State::ready;
    Site site;  // of the last wait
};

// An exchange is complete when all lanes have arrived; a lane reads the values before it arrives at the next one, so two
// sets of values are enough.
struct Warp {
    uint32_t ready = 0;  // bit i: the i-th lane in the order of lanes can run
    unsigned arrived = 0;
    unsigned round = 0;
    uint64_t values[2][kWarp];
};

struct Machine {
    std::mutex one_launch;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Warp> warps;
    std::vector<unsigned> warp_order;
    std::vector<unsigned> lane_order;
    unsigned turn = 0;  // position in warp_order of the warp that runs
    Fiber scheduler;    // the stack of the caller of the kernel
    std::function<void()> kernel;
    std::string name;
    unsigned size = 0;  // threads per block
    unsigned at_barrier = 0;
    unsigned returned = 0;
    std::exception_ptr failure;
};

inline Machine& machine() {
    static Machine* one = new Machine;  // never destroyed: its stacks live as long as the process
    return *one;
}

// What the running thread sees. One launch at a time, so these are plain variables.
inline Thread* running = nullptr;
inline dim3 grid_size;
inline dim3 block_size;
inline uint3 block_index;
inline void* dynamic_shared = nullptr;

// ---- waiting

// "0-31, 64": linear indices, which must be ascending.
inline std::string ranges(const std::vector<unsigned>& indices) {
    std::string text;
    for (size_t first = 0; first < indices.size();) {
        size_t last = first;
        while (last + 1 < indices.size() && indices[last + 1] == indices[last] + 1) {
            ++last;
        }
        text += (text.empty() ? "" : ", ") + std::to_string(indices[first]);
        text += last > first ? "-" + std::to_string(indices[last]) : "";
        first = last + 1;
    }
    return text;
}

inline std::string place(Machine& m) {
    return "emulation: kernel " + m.name + ", block (" + std::to_string(block_index.x) + ", " +
           std::to_string(block_index.y) + ", " + std::to_string(block_index.z) + "): ";
}

// Groups threads by what they do: one clause per place where some wait.
inline std::string whereabouts(Machine& m) {
    std::vector<std::pair<std::string, std::vector<unsigned>>> groups;
    for (unsigned i = 0; i < m.size; ++i) {
        const Thread& thread = *m.threads[i];
        std::string what = thread.state == State::returned ? "have returned"
                           : thread.state == State::ready  ? "run"
                                                           : "wait at " + thread.site.text();
        auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& group) { return group.first == what; });
        if (same == groups.end()) {
            groups.push_back({what, {}});
            same = groups.end() - 1;
        }
        same->second.push_back(i);
    }
    std::string text;
    for (const auto& [what, threads] : groups) {
        text += (text.empty() ? "threads " : "; threads ") + ranges(threads) + " " + what;
    }
    return text;
}

[[noreturn]] inline void fail(const std::string& why) {
    throw std::runtime_error(place(machine()) + why);
}

inline void wait(State state, Site site) {
    Thread& me = *running;
    me.state = state;
    me.site = site;
}

// The stack to go on with: a warp runs until all its lanes wait, then the next one does. The scheduler's when none can.
inline Fiber& next(Machine& m) {
    while (m.turn < m.warps.size() && m.warps[m.warp_order[m.turn]].ready == 0) {
        ++m.turn;
    }
    if (m.turn == m.warps.size() || m.failure) {
        return m.scheduler;
    }
    const unsigned warp = m.warp_order[m.turn];
    const unsigned lane = m.lane_order[static_cast<unsigned>(__builtin_ctz(m.warps[warp].ready))];
    m.warps[warp].ready &= m.warps[warp].ready - 1;
    running = m.threads[warp * kWarp + lane].get();
    return running->fiber;
}

inline void yield() {
    Fiber& mine = running->fiber;
    Fiber& other = next(machine());
    if (&mine != &other) {
        switch_fiber(mine, other);
    }
}

inline void release(Machine& m, unsigned warp) {
    m.warps[warp].ready = 0xffffffffu;
    for (unsigned i = 0; i < kWarp; ++i) {
        m.threads[warp * kWarp + i]->state = State::ready;
    }
}

// __syncthreads: every thread of the block, all at the same line. CUDA lets threads that have returned be absent; not so
// here, for early returns before a barrier are mistakes more often than not.
inline void barrier(Site site) {
    Machine& m = machine();
    wait(State::at_barrier, site);
    if (++m.at_barrier == m.size) {
        for (unsigned i = 0; i < m.size; ++i) {
            if (!(m.threads[i]->site == site)) {
                fail("threads meet at different barriers: " + whereabouts(m));
            }
        }
        for (unsigned warp = 0; warp < m.warps.size(); ++warp) {
            release(m, warp);
        }
        m.at_barrier = m.turn = 0;
    }
    yield();
}

// Every lane of the warp gives a value and sees those of all.
inline const uint64_t* exchange(unsigned mask, uint64_t value, Site site) {
    Machine& m = machine();
    Thread& me = *running;
    if (mask != 0xffffffffu) {
        fail("a mask other than 0xffffffff at " + site.text());
    }
    const unsigned warp_index = me.linear / kWarp;
    Warp& warp = m.warps[warp_index];
    uint64_t* values = warp.values[warp.round & 1];
    values[me.linear % kWarp] = value;
    wait(State::at_exchange, site);
    if (++warp.arrived == kWarp) {
        for (unsigned i = 0; i < kWarp; ++i) {
            if (!(m.threads[warp_index * kWarp + i]->site == site)) {
                fail("lanes of a warp meet at different exchanges: " + whereabouts(m));
            }
        }
        release(m, warp_index);
        warp.arrived = 0;
        ++warp.round;
    }
    yield();
    return values;
}

// ---- launch

inline void thread_entry() {
    Machine& m = machine();
    entered(m.scheduler);
    try {
        m.kernel();
    } catch (...) {
        m.failure = std::current_exception();
    }
    Fiber& mine = running->fiber;
    running->state = State::returned;
    ++m.returned;
    switch_fiber(mine, next(m), true);
}

// Gives the thread up where it stands; its stack is prepared anew before it is used again.
inline void on_fault(void* address) {
    Machine& m = machine();
    Fiber& mine = running->fiber;
    const char* at = static_cast<const char*>(address);
    const bool overflow = at < mine.stack && at >= mine.stack - kGuardBytes;
    char text[32];
    std::snprintf(text, sizeof(text), "%p", address);
    m.failure = std::make_exception_ptr(
        std::runtime_error(place(m) + "thread " + std::to_string(running->linear) +
                           (overflow ? " needs more than " + std::to_string(kStackBytes) + " bytes of stack"
                                     : " accesses address " + std::string(text) + ", where no memory is")));
    switch_fiber(mine, m.scheduler);
}

inline void prepare_block(Machine& m) {
    m.at_barrier = m.returned = m.turn = 0;
    for (Warp& warp : m.warps) {
        warp.arrived = warp.round = 0;
        warp.ready = 0xffffffffu;
    }
    for (unsigned i = 0; i < m.size; ++i) {
        Thread& thread = *m.threads[i];
        thread.linear = i;
        thread.index = uint3{i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
        thread.state = State::ready;
        prepare(thread.fiber, thread_entry, i);
    }
}

inline void run_block(Machine& m) {
    prepare_block(m);
    switch_fiber(m.scheduler, next(m));  // comes back when no thread can run
    if (m.failure) {
        std::rethrow_exception(std::exchange(m.failure, nullptr));
    }
    if (m.returned < m.size) {
        fail("deadlock: " + whereabouts(m));
    }
}

inline void check_sizes(dim3 grid, dim3 block, size_t shared_bytes) {
    const uint64_t size = uint64_t{block.x} * block.y * block.z;
    if (size == 0 || size > 1024 || size % kWarp != 0) {
        fail("a block of " + std::to_string(size) + " threads; expected a multiple of 32 up to 1024");
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
        fail("a grid of (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) + ", " + std::to_string(grid.z) +
             ") blocks; each size is at least 1 and at most (2147483647, 65535, 65535)");
    }
    if (shared_bytes > kMaxDynamicShared) {
        fail(std::to_string(shared_bytes) + " bytes of shared memory; a block has " +
             std::to_string(kMaxDynamicShared));
    }
}

inline void run_grid(const char* name, dim3 grid, dim3 block, size_t shared_bytes, std::function<void()> kernel) {
    Machine& m = machine();
    std::lock_guard<std::mutex> lock(m.one_launch);
    m.name = *name == '(' ? std::string(name + 1, std::strlen(name) - 2) : name;  // (kernel<T, N>)
    grid_size = grid;
    block_size = block;
    block_index = uint3{0, 0, 0};
    check_sizes(grid, block, shared_bytes);
    m.size = block.x * block.y * block.z;
    m.warps.resize(m.size / kWarp);
    while (m.threads.size() < m.size) {
        m.threads.push_back(std::make_unique<Thread>());
        allocate(m.threads.back()->fiber);
    }
    m.kernel = std::move(kernel);
    m.scheduler = Fiber{};
    Schedule schedule = Schedule::from_environment();
    const int byte = poison(schedule.order);
    const FaultHandler faults(on_fault);
    const Blocks blocks(name, uint64_t{grid.x} * grid.y * grid.z);
    for (uint64_t step = 0; step < blocks.count(); ++step) {
        const uint64_t i = blocks[schedule.order == Order::ascending ? step : blocks.count() - 1 - step];
        block_index = uint3{static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                            static_cast<unsigned>(i / grid.x / grid.y)};
        schedule.permute(m.warp_order, m.size / kWarp);
        schedule.permute(m.lane_order, kWarp);
        poison_static_shared(byte);
        DynamicShared memory(shared_bytes, byte);
        dynamic_shared = memory.data();
        run_block(m);
        if (!memory.intact()) {
            fail("wrote outside of its " + std::to_string(shared_bytes) + " bytes of dynamic shared memory");
        }
    }
    m.kernel = nullptr;
}

}  // namespace stoker::emulation
#pragma GCC visibility pop
