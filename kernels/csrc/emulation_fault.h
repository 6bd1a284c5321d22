// Turns a kernel's access to memory that is not there into an exception of the launch. Owns the handler of SIGSEGV and
// SIGBUS while a kernel runs. With AddressSanitizer nothing is done here: its report says more.
#pragma once

#include <signal.h>

#include <cstddef>

#pragma GCC visibility push(hidden)
namespace stoker::emulation {

#if defined(__SANITIZE_ADDRESS__)
struct FaultHandler {
    explicit FaultHandler(void (*)(void*)) {}
};
#else
// For its lifetime, a fault calls on_fault(address) on a stack of its own. on_fault must not return: the access that
// failed would be tried again.
class FaultHandler {
  public:
    explicit FaultHandler(void (*on_fault)(void*)) {
        handler() = on_fault;
        stack_t mine{};
        mine.ss_sp = stack();
        mine.ss_size = kBytes;
        sigaltstack(&mine, &old_stack_);
        struct sigaction action {};
        action.sa_sigaction = [](int, siginfo_t* info, void*) { handler()(info->si_addr); };
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &old_segv_);
        sigaction(SIGBUS, &action, &old_bus_);
    }
    ~FaultHandler() {
        sigaction(SIGSEGV, &old_segv_, nullptr);
        sigaction(SIGBUS, &old_bus_, nullptr);
        sigaltstack(&old_stack_, nullptr);
    }
    FaultHandler(const FaultHandler&) = delete;
    FaultHandler& operator=(const FaultHandler&) = delete;

  private:
    static constexpr size_t kBytes = 64 * 1024;
    static char* stack() {
        static char* memory = new char[kBytes];
        return memory;
    }
    static void (*&handler())(void*) {
        static void (*function)(void*) = nullptr;
        return function;
    }
    stack_t old_stack_{};
    struct sigaction old_segv_ {};
    struct sigaction old_bus_ {};
};
#endif

}  // namespace stoker::emulation
#pragma GCC visibility pop
