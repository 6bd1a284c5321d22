"""Token data: the .bin/.idx format, sampling as a closed formula, prefetch, tokenisation."""
