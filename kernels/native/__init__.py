"""The native kernels' Python side: building and loading csrc/, and a wrapper per op family with the op's signature."""
