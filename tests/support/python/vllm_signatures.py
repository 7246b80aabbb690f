"""Records the signatures of vLLM that the adapter calls, from a wheel of it, which is not installed.

pip download --no-deps vllm==0.33.0
python tests/support/python/vllm_signatures.py vllm-0.33.0-*.whl >tests/support/fake_vllm/vllm/signatures.json
"""

import ast
import json
import sys
import zipfile

# Names in signatures.json, and the file, class and function in the wheel. Without a function the
# class is a dataclass.
CALLS = {
    "LLM": ("entrypoints/llm.py", "LLM", "__init__"),
    "LLM.encode": ("entrypoints/pooling/offline.py", "PoolingOfflineMixin", "encode"),
    "EngineArgs": ("engine/arg_utils.py", "EngineArgs", None),
    "PoolerConfig": ("config/pooler.py", "PoolerConfig", None),
    "PoolingParams": ("pooling_params.py", "PoolingParams", None),
    "PoolingRequestOutput": ("outputs.py", "PoolingRequestOutput", "__init__"),
    "PoolingOutput": ("outputs.py", "PoolingOutput", None),
} | {
    ".".join(filter(None, place)): (f"distributed/weight_transfer/{file}.py", *place)
    for file, *place in (
        ("base", "Replicate", None),
        ("base", "Shard", None),
        ("base", "ParamMeta", None),
        ("base", "TrainerInitInfo", None),
        ("base", "WeightSource", "implements_iter_full"),
        ("base", "WeightSource", "implements_iter_local"),
        ("base", "WeightSource", "iter_full"),
        ("base", "WeightSource", "iter_local"),
        ("base", "TrainerWeightTransferEngine", "__init__"),
        ("base", "TrainerWeightTransferEngine", "trainer_init"),
        ("base", "TrainerWeightTransferEngine", "send_weights"),
        ("base", "TrainerWeightTransferEngine", "shutdown"),
        ("factory", "WeightTransferTrainerFactory", "register_engine"),
        ("factory", "WeightTransferTrainerFactory", "trainer_init"),
    )
}


def default_of(node: ast.expr | None) -> ast.expr | None:
    """Returns a default that needs no import: a constant, or "..." for anything else."""
    return node if node is None or isinstance(node, ast.Constant) else ast.Constant(...)


def keywords_of(field: ast.AnnAssign) -> dict[str | None, ast.expr]:
    """Returns the keywords of dataclasses.field, if that is the value of a field."""
    call = field.value
    return {each.arg: each.value for each in call.keywords} if isinstance(call, ast.Call) else {}


def arguments_of(source: str, class_name: str, function: str | None) -> str:
    """Returns the parameters of a function, without types, as Python text."""
    (of_class,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    if function is None:
        fields = [
            node
            for node in of_class.body
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
        ]
        kw_only = [node for node in fields if "kw_only" in keywords_of(node)]
        fields = [node for node in fields if node not in kw_only]
        defaults = [default_of(node.value) for node in fields if node.value]
        kw_defaults = [default_of(keywords_of(node).get("default")) for node in kw_only]
        names, kw_names = (
            [ast.arg(ast.unparse(node.target)) for node in nodes] for nodes in (fields, kw_only)
        )
        return ast.unparse(ast.arguments([], names, None, kw_names, kw_defaults, None, defaults))
    (found,) = (
        node
        for node in of_class.body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    arguments = found.args
    arguments.args = arguments.args[1:]
    for argument in (*arguments.args, *arguments.kwonlyargs, arguments.kwarg):
        if argument:
            argument.annotation = None
    arguments.defaults = [default_of(node) for node in arguments.defaults]
    arguments.kw_defaults = [default_of(node) for node in arguments.kw_defaults]
    return ast.unparse(arguments)


def main() -> None:
    (wheel,) = sys.argv[1:]
    record = {"version": wheel.rsplit("/", 1)[-1].split("-")[1]}
    with zipfile.ZipFile(wheel) as file:
        for name, (path, *place) in CALLS.items():
            record[name] = arguments_of(file.read(f"vllm/{path}").decode(), *place)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
