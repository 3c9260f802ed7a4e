"""A part of torch's own tests. `python -m torch_suite`, in `tests`, runs all of them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from processes.programs import clean_environment, run

TESTS = Path(__file__).parent.parent
SELECTED = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_product",
    "test_all_reduce_coalesced_max_complex_unsupported",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_to_all_single_unequal_split",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_ddp_create_graph",
    "test_destroy_group",
    "test_gather_checks",
    "test_gather_object",
    "test_get_backend",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_new_subgroups_with_group_param",
    "test_reduce_sum_twice",
    "test_scatter_checks",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
)


@pytest.mark.backend
@pytest.mark.torch_suite
def test_what_passes_over_gloo_passes_over_unisono() -> None:
    pytest.importorskip("expecttest", reason="torch's own tests import it")
    names = [f"DistributedTest.{name}" for name in SELECTED]
    # Importing torch's tests changes a process, so they have their own one.
    environ = clean_environment(PYTHONPATH=os.pathsep.join([str(TESTS), *sys.path]))
    status, output, errors = run([sys.executable, "-m", "torch_suite", *names], environ, 280)

    assert status == 0, output + errors
    # A later torch may skip or drop some.
    found = re.search(r"(\d+) tests use a group and pass over Gloo", output)
    assert found is not None
    assert int(found[1]) > len(SELECTED) // 2
