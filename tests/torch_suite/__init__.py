"""torch's own distributed tests, run over Gloo and over Unisono.

Usage: cd tests && python -m torch_suite [CLASS | CLASS.TEST ...]
"""
