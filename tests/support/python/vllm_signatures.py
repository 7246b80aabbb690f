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
}


def default_of(node: ast.expr | None) -> ast.expr | None:
    """Returns a default that needs no import: a constant, or "..." for anything else."""
    return node if node is None or isinstance(node, ast.Constant) else ast.Constant(...)


def arguments_of(source: str, class_name: str, function: str | None) -> str:
    """Returns the parameters of a function, without types, as Python text."""
    (of_class,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    if function is None:
        fields = [node for node in of_class.body if isinstance(node, ast.AnnAssign)]
        names = [ast.arg(ast.unparse(node.target)) for node in fields]
        defaults = [default_of(node.value) for node in fields if node.value]
        return ast.unparse(ast.arguments([], names, None, [], [], None, defaults))
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
