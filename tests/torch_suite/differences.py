"""The tests that pass over Gloo and not over Unisono, and why.

Only the name of the backend and the words of an error may differ.
"""

_NAME = 'the test or torch asks for the name "gloo"'

DIFFERENCES = {
    "DistributedTest.test_get_backend": _NAME,
    "DistributedTest.test_monitored_barrier_gloo": _NAME,
    "DistributedTest.test_monitored_barrier_gloo_subgroup": _NAME,
}
