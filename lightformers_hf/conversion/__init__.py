"""A trained checkpoint in, a smaller one out.

`convert` and `plan` are public names of `lightformers_hf`. Nothing is imported here, so that `.options` is read
without torch.
"""
