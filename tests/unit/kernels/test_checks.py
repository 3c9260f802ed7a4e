import pytest
import torch

from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.kernels import check_replicas
from unisono.options import ReduceOp


@pytest.mark.parametrize("op", ReduceOp)
def test_equal_shapes_and_dtypes_go_together(op: ReduceOp) -> None:
    check_replicas(op, [torch.ones(2, 3), torch.zeros(2, 3), torch.ones(3, 2).t()])


def test_one_replica_goes_with_itself() -> None:
    check_replicas(ReduceOp.SUM, [torch.ones(())])


def test_dense_and_sparse_replicas_go_together() -> None:
    check_replicas(ReduceOp.SUM, [torch.ones(2), torch.ones(2).to_sparse()])


def test_another_shape_is_an_error_that_names_the_replica_and_both_shapes() -> None:
    tensors = [torch.ones(2), torch.ones(2), torch.ones(3), torch.ones(2)]

    with pytest.raises(ReplicaMismatchError) as caught:
        check_replicas(ReduceOp.SUM, tensors, "The gradient of `weight`")

    assert str(caught.value).startswith(
        "The gradient of `weight` must have the same shape on all 4 replicas, but replica 2 has "
        "(3,), and the others have (2,)."
    )


def test_another_dtype_is_an_error_that_names_the_replica_and_both_dtypes() -> None:
    tensors = [torch.ones(2, dtype=torch.float64), torch.ones(2), torch.ones(2)]

    with pytest.raises(
        ReplicaMismatchError,
        match=r"same dtype .*replica 0 has torch.float64, and the others have torch.float32",
    ):
        check_replicas(ReduceOp.SUM, tensors)


def test_every_odd_replica_is_named() -> None:
    tensors = [torch.ones(()), torch.ones(1), torch.ones(()), torch.ones(1, 0), torch.ones(())]

    with pytest.raises(
        ReplicaMismatchError, match=r"replica 1 has \(1,\), replica 3 has \(1, 0\), .* have \(\)"
    ):
        check_replicas(ReduceOp.SUM, tensors)


@pytest.mark.parametrize("op", ReduceOp)
def test_bool_is_refused_with_what_to_do(op: ReduceOp) -> None:
    with pytest.raises(UnsupportedError, match=rf"torch.bool, which has no {op}. Convert it"):
        check_replicas(op, [torch.ones(2, dtype=torch.bool)])


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_complex_numbers_have_no_order(op: ReduceOp) -> None:
    with pytest.raises(UnsupportedError, match=f"torch.complex64, .* have no {op}"):
        check_replicas(op, [torch.ones(2, dtype=torch.complex64)])


def test_floats_of_one_byte_are_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match=r"torch.float8_e4m3fn, .*torch.float32"):
        check_replicas(ReduceOp.SUM, [torch.ones(2).to(torch.float8_e4m3fn)])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_another_sparse_layout_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match=r"layout torch.sparse_csr .*`.to_dense\(\)`"):
        check_replicas(ReduceOp.SUM, [torch.eye(2).to_sparse_csr()])
