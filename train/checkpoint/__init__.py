"""Tools that work on finished checkpoints (`stoker checkpoint`): what needs torch or Hugging Face's formats."""
