// Stacks for CUDA threads on the CPU and the switch between them: about 10 ns, no system call.
// Owns memory, guards and what AddressSanitizer must be told. Not here: when a thread runs (emulation_block.h).
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Saves the callee-saved registers on the running stack, stores its pointer at *save, and goes on at `next`.
// The symbol is local to each object file, so that several of them can be linked together. A jump, for the processor would
// predict that a return goes back to the caller.
#if defined(__x86_64__)
asm(R"(
    .pushsection .text
    .p2align 4
    .type stoker_switch_stack, @function
stoker_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
    .size stoker_switch_stack, . - stoker_switch_stack
    .popsection
)");
#elif defined(__aarch64__)
asm(R"(
    .pushsection .text
    .p2align 4
    .type stoker_switch_stack, %function
stoker_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size stoker_switch_stack, . - stoker_switch_stack
    .popsection
)");
#endif
#if defined(__x86_64__) || defined(__aarch64__)
extern "C" __attribute__((visibility("hidden"))) void stoker_switch_stack(void** save, void* next);
#endif

#pragma GCC visibility push(hidden)
namespace stoker::emulation {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 256 * 1024;  // redzones and unoptimised frames
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif
constexpr size_t kGuardBytes = 64 * 1024;  // whole pages on every machine

// A stack that is either running or suspended. The scheduler's own stack is one too: it has no memory of its own.
struct Fiber {
#if defined(__x86_64__) || defined(__aarch64__)
    void* pointer = nullptr;
#else
    ucontext_t context;
#endif
    char* stack = nullptr;  // lowest usable byte
    size_t bytes = 0;
    bool suspended = false;
    void* fake_stack = nullptr;  // AddressSanitizer's, while the fiber is suspended
};

// Nothing may be touched below a stack: too deep a recursion or too large a local array stops at it.
inline void allocate(Fiber& fiber) {
    void* memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
        throw std::runtime_error("emulation: no memory for the stack of a CUDA thread");
    }
    fiber.stack = static_cast<char*>(memory) + kGuardBytes;
    fiber.bytes = kStackBytes;
}

// The next switch to `fiber` calls entry(), which must never return. What the stack held before is forgotten.
// `colour` spreads the tops of equally aligned stacks over the sets of the caches.
inline void prepare(Fiber& fiber, void (*entry)(), unsigned colour) {
#if defined(__SANITIZE_ADDRESS__)
    // Red zones of entry(), which never returns, lie at the top; those of a kernel left in the middle, anywhere.
    const size_t guarded = fiber.suspended ? fiber.bytes : 8192;
    __asan_unpoison_memory_region(fiber.stack + fiber.bytes - guarded, guarded);
    fiber.fake_stack = nullptr;
#endif
    char* top = fiber.stack + fiber.bytes - 128 * (colour % 29) - 64;
#if defined(__x86_64__)
    void** frame = reinterpret_cast<void**>(top);
    *--frame = nullptr;  // where entry() would return to: the end of every backtrace; also aligns its frame
    *--frame = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) {
        *--frame = nullptr;
    }
    fiber.pointer = frame;
#elif defined(__aarch64__)
    void** frame = reinterpret_cast<void**>(top - 160);
    for (int saved = 0; saved < 20; ++saved) {
        frame[saved] = nullptr;
    }
    frame[11] = reinterpret_cast<void*>(entry);  // x30
    fiber.pointer = frame;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = static_cast<size_t>(top - fiber.stack);
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
#endif
}

// Suspends `from`, the running stack, and goes on with `to`. `ends`: `from` will be prepared anew before it runs again.
inline void switch_fiber(Fiber& from, Fiber& to, bool ends = false) {
    from.suspended = !ends;
    to.suspended = false;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.stack, to.bytes);
#endif
#if defined(__x86_64__) || defined(__aarch64__)
    stoker_switch_stack(&from.pointer, to.pointer);
#else
    swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// What entry() begins with. The first fiber of a launch comes from the scheduler, whose bounds only AddressSanitizer knows.
inline void entered(Fiber& scheduler) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (scheduler.stack == nullptr) {
        scheduler.stack = const_cast<char*>(static_cast<const char*>(bottom));
        scheduler.bytes = bytes;
    }
#else
    (void)scheduler;
#endif
}

}  // namespace stoker::emulation
#pragma GCC visibility pop
