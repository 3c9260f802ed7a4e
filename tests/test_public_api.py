"""The public names: sorted, complete, documented, and spelled as on TensorFlow's pages."""

import importlib
import inspect
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import unisono as uo

ROOT = Path(uo.__file__).parent
PACKAGES = [
    ".".join(("unisono", *path.parent.relative_to(ROOT).parts))
    for path in sorted(ROOT.rglob("__init__.py"))
]

each_module = pytest.mark.parametrize(
    "name", [*PACKAGES, "unisono.cluster_resolver", "unisono.errors", "unisono.experimental"]
)


@each_module
def test_exported_names_are_sorted(name: str) -> None:
    module = importlib.import_module(name)

    assert list(module.__all__) == sorted(set(module.__all__), key=by_kind)


@each_module
def test_exported_names_exist(name: str) -> None:
    module = importlib.import_module(name)

    assert [exported for exported in module.__all__ if not hasattr(module, exported)] == []


@each_module
def test_no_public_name_is_left_out(name: str) -> None:
    module = importlib.import_module(name)
    ours = {key for key, thing in vars(module).items() if is_ours(thing) and key[0] != "_"}

    assert ours - set(module.__all__) == set()


@each_module
def test_exported_names_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    exported = {key: getattr(module, key) for key in module.__all__}

    undocumented = [key for key, thing in exported.items() if has_no_docstring(thing)]

    assert undocumented == []


@each_module
def test_public_methods_of_exported_classes_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    classes = [c for key in module.__all__ if inspect.isclass(c := getattr(module, key))]

    undocumented = [
        f"{cls.__name__}.{key}"
        for cls in classes
        for key, member in vars(cls).items()
        if key[0] != "_" and isinstance(member, METHODS) and not inspect.getdoc(member)
    ]

    assert undocumented == []


@pytest.mark.parametrize(
    ("older", "today"),
    [
        ("AllReduceCrossTowerOps", "unisono.contrib.AllReduceCrossDeviceOps"),
        ("CrossDeviceOps", "unisono.CrossDeviceOps"),
        ("DistributionStrategy", "unisono.Strategy"),
        ("DistributionStrategyExtended", "unisono.StrategyExtended"),
        ("OneDeviceStrategy", "unisono.OneDeviceStrategy"),
        ("ReplicaContext", "unisono.ReplicaContext"),
        ("TowerContext", "unisono.ReplicaContext"),
        ("get_cross_replica_context", "unisono.in_cross_replica_context"),
        ("get_cross_tower_context", "unisono.in_cross_replica_context"),
        ("get_distribution_strategy", "unisono.get_strategy"),
        ("get_loss_reduction", "unisono.get_strategy"),
        ("get_tower_context", "unisono.get_replica_context"),
        ("has_distribution_strategy", "unisono.has_strategy"),
        ("require_replica_context", "unisono.get_replica_context"),
        ("require_tower_context", "unisono.get_replica_context"),
        ("ReductionToOneDeviceCrossDeviceOps", "unisono.ReductionToOneDevice"),
        ("ReductionToOneDeviceCrossTowerOps", "unisono.ReductionToOneDevice"),
    ],
)
def test_an_older_name_warns_once_and_says_what_to_write_today(older: str, today: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = getattr(uo.contrib, older)

    assert callable(found)
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__
    assert older in str(warning.message)
    assert f"write `{today}`" in str(warning.message)
    module, _, name = today.rpartition(".")
    assert name in importlib.import_module(module).__all__


def test_a_name_that_contrib_never_had_is_missing() -> None:
    with pytest.raises(AttributeError, match="CrossPlanetOps"):
        _ = uo.contrib.CrossPlanetOps


# What the API pages print, argument by argument.
REDUCE = "reduce_op, per_replica_value, destinations"
BATCH = "reduce_op, value_destination_pairs"
BROADCAST = "tensor, destinations"


@pytest.mark.parametrize(
    ("callable_name", "page"),
    [
        ("CrossDeviceOps", ""),
        ("CrossDeviceOps.reduce", f"{REDUCE}, options=None"),
        ("CrossDeviceOps.batch_reduce", f"{BATCH}, options=None"),
        ("CrossDeviceOps.broadcast", BROADCAST),
        ("CrossDeviceOps.reduce_implementation", f"{REDUCE}, options"),
        ("CrossDeviceOps.batch_reduce_implementation", f"{BATCH}, options"),
        ("CrossDeviceOps.broadcast_implementation", BROADCAST),
        ("ReductionToOneDevice", "reduce_to_device=None, accumulation_fn=None"),
        ("ReductionToOneDevice.reduce", f"{REDUCE}, options=None"),
        ("ReductionToOneDevice.batch_reduce", f"{BATCH}, options=None"),
        ("ReductionToOneDevice.broadcast", BROADCAST),
        ("NcclAllReduce", "num_packs=1"),
        ("HierarchicalCopyAllReduce", "num_packs=1"),
        (
            "contrib.AllReduceCrossDeviceOps",
            "all_reduce_alg='nccl', num_packs=1, agg_small_grads_max_bytes=0, "
            "agg_small_grads_max_group=10",
        ),
        ("contrib.AllReduceCrossDeviceOps.broadcast", BROADCAST),
        ("contrib.CrossTowerOps", ""),
        ("contrib.CrossTowerOps.reduce", "aggregation, per_device_value, destinations"),
        ("contrib.CrossTowerOps.batch_reduce", "aggregation, value_destination_pairs"),
        ("contrib.CrossTowerOps.broadcast", BROADCAST),
        ("Strategy.run", "fn, args=(), kwargs=None, options=None"),
        ("Strategy.reduce", "reduce_op, value, axis=None"),
        ("Strategy.gather", "value, axis"),
        ("Strategy.experimental_local_results", "value"),
        ("Strategy.experimental_distribute_dataset", "dataset, options=None"),
        ("Strategy.distribute_datasets_from_function", "dataset_fn, options=None"),
        ("Strategy.experimental_distribute_datasets_from_function", "dataset_fn, options=None"),
        ("Strategy.experimental_distribute_values_from_function", "value_fn"),
        ("Strategy.experimental_make_numpy_dataset", "numpy_input, session=None"),
        ("Strategy.make_dataset_iterator", "dataset"),
        ("Strategy.make_input_fn_iterator", "input_fn, replication_mode=PER_WORKER"),
        ("Strategy.experimental_run", "fn, input_iterator=None"),
        ("Strategy.update_config_proto", "config_proto"),
        (
            "Strategy.configure",
            "session_config=None, cluster_spec=None, task_type=None, task_id=None",
        ),
        ("StrategyExtended.reduce_to", "reduce_op, value, destinations, options=None"),
        ("StrategyExtended.batch_reduce_to", f"{BATCH}, options=None"),
        ("StrategyExtended.broadcast_to", BROADCAST),
        ("StrategyExtended.call_for_each_replica", "fn, args=(), kwargs=None"),
        ("StrategyExtended.update", "var, fn, args=(), kwargs=None, group=True"),
        ("StrategyExtended.update_non_slot", "colocate_with, fn, args=(), kwargs=None, group=True"),
        ("StrategyExtended.non_slot_devices", "var_list"),
        ("StrategyExtended.read_var", "v"),
        ("StrategyExtended.value_container", "value"),
        ("StrategyExtended.variable_created_in_scope", "v"),
        ("StrategyExtended.colocate_vars_with", "colocate_with_variable"),
        (
            "StrategyExtended.experimental_run_steps_on_iterator",
            "fn, iterator, iterations=1, initial_loop_values=None",
        ),
        ("StrategyExtended.experimental_make_numpy_dataset", "numpy_input, session=None"),
        (
            "Variable",
            "initial_value, trainable=None, validate_shape=True, caching_device=None, name=None, "
            "variable_def=None, dtype=None, import_scope=None, constraint=None, "
            "synchronization=AUTO, aggregation=NONE, shape=None",
        ),
        ("ReplicaContext.merge_call", "merge_fn, args=(), kwargs=None"),
        ("ReplicaContext.all_reduce", "reduce_op, value, options=None"),
        ("ReplicaContext.all_gather", "value, axis, options=None"),
        (
            "cluster_resolver.SimpleClusterResolver",
            "cluster_spec, master='', task_type=None, task_id=None, environment='', "
            "num_accelerators=None, rpc_layer=None",
        ),
        (
            "contrib.MirroredStrategy",
            "devices=None, num_gpus=None, num_gpus_per_worker=None, cross_device_ops=None, "
            "auto_shard_dataset=False, cross_tower_ops=None",
        ),
        ("contrib.CollectiveAllReduceStrategy", "num_gpus_per_worker=0, communication=AUTO"),
        (
            "contrib.DistributeConfig",
            "train_distribute=None, eval_distribute=None, remote_cluster=None",
        ),
        (
            "contrib.StandardSingleLossStep",
            "dataset_fn, loss_fn, optimizer, distribution, iterations_per_step=1",
        ),
        ("contrib.Monitor", "step_callable, session=None"),
        (
            "RunOptions",
            "experimental_enable_dynamic_batch_size=True, "
            "experimental_bucketizing_dynamic_shape=False, experimental_xla_options=None",
        ),
        (
            "experimental.MultiWorkerMirroredStrategy",
            "communication=AUTO, cluster_resolver=None",
        ),
        (
            "experimental.PreemptionCheckpointHandler",
            "cluster_resolver, checkpoint_or_checkpoint_manager, checkpoint_dir=None, "
            "termination_config=None",
        ),
        (
            "experimental.PreemptionCheckpointHandler.run",
            "distributed_train_function, args, kwargs",
        ),
        (
            "experimental.TerminationConfig",
            "termination_watcher_fn=None, exit_fn=None, grace_period=None, save_fn=None",
        ),
        ("experimental.CollectiveHints", "bytes_per_pack=0, timeout_seconds=None"),
        ("experimental.ValueContext", "replica_id_in_sync_group=0, num_replicas_in_sync=1"),
        (
            "experimental.CommunicationOptions",
            "bytes_per_pack=0, timeout_seconds=None, implementation=AUTO",
        ),
    ],
)
def test_a_signature_is_that_of_the_page(callable_name: str, page: str) -> None:
    assert ", ".join(arguments(callable_name)) == page


@pytest.mark.parametrize(
    ("method", "page"), [("reduce", REDUCE), ("batch_reduce", BATCH)], ids=["reduce", "batch"]
)
def test_the_page_of_all_reduce_knows_no_options_so_they_come_last(method: str, page: str) -> None:
    found = arguments(f"contrib.AllReduceCrossDeviceOps.{method}")

    assert found == [*page.split(", "), "options=None"]


METHODS = (classmethod, staticmethod, property, type(lambda: None))


def by_kind(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then the rest, as ruff sorts them."""
    return not name.isupper(), not name[0].isupper(), name


def is_ours(thing: object) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("unisono") and callable(thing)


def has_no_docstring(thing: object) -> bool:
    # To Python 3.10 an alias such as `Callable[[int], int]` is a class.
    is_alias = hasattr(thing, "__origin__")
    can_have_one = (inspect.isclass(thing) and not is_alias) or inspect.isfunction(thing)
    return (can_have_one or isinstance(thing, ModuleType)) and not thing.__doc__


def arguments(callable_name: str) -> list[str]:
    """The arguments as a page prints them, without `self`."""
    thing: object = uo
    for name in callable_name.split("."):
        thing = getattr(thing, name)
    assert callable(thing)
    return [
        parameter.name
        if parameter.default is parameter.empty
        else f"{parameter.name}={getattr(parameter.default, 'name', repr(parameter.default))}"
        for parameter in inspect.signature(thing).parameters.values()
        if parameter.name != "self"
    ]
