"""Training data: Megatron .bin/.idx files, the order of samples, prefetch, fingerprints, tokenisation.

Owns what lies between text on disk and a batch of token ids; knows nothing of models, optimizers or process groups.
`build.build_data` is the trainer's way in, `tokenize` the user's. Nothing is imported here: tokenising needs no torch.
"""
