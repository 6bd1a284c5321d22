// A kernel that a test starts through ctypes: NAME(out, n) returns what the launch raised, or "".
#pragma once

#include "../../../../kernels/csrc/emulation.h"

#include <string>

#define CASE(name, ...)                                                                          \
    extern "C" __attribute__((visibility("default"))) const char* name(int* out, int64_t n) {    \
        static std::string why;                                                                  \
        try {                                                                                    \
            STOKER_LAUNCH(__VA_ARGS__, out, n);                                                  \
            return "";                                                                           \
        } catch (const std::exception& error) {                                                  \
            why = error.what();                                                                  \
            return why.c_str();                                                                  \
        }                                                                                        \
    }
