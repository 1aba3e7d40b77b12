"""Trace an ordinary `nn.Module` to its computation graph, with `torch.fx` and one forward pass of zeros.

A node is a layer with parameters, a join of branches, a pooling or another operation that changes the input of the next
layer. An activation belongs to the node before it. It has its own node only if that node's output is also read
elsewhere. Dropout, flattening and scaling by constants have no node. A parameter that is used outside a layer has a
node, and so has each linear map of attention and recurrent cells, one after the other.

Affine parameters of normalisation layers are generated like others. Running statistics are buffers: they are never
generated and stay on the client.
"""

import dataclasses
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import transformer

from hyperbloom.common.errors import ModelError, describe
from hyperbloom.common.graphs import operations
from hyperbloom.common.graphs.graph import Graph, Node
from hyperbloom.common.graphs.layer import LayerError, LayerType
from hyperbloom.common.models.parts import untouched

BATCH = 2
_CONSTANT = (bool, int, float, str, type(None))


def trace(module: nn.Module, input_shape: tuple[int, ...]) -> Graph:
    """Return the computation graph of a network.

    The network, on any device, takes one tensor of inputs `(B, *input_shape)` and returns one tensor of outputs. It
    runs in evaluation mode and is restored afterwards, together with torch's random state.

    Raises:
        ModelError: a module cannot be represented. The message names it and says why.
    """
    if next(module.parameters(), None) is None:
        raise ModelError(f"{type(module).__name__}: expected a network with parameters, found none")
    with untouched(module):
        graph = _Tracer().run(module)
        shapes = _Shapes(module, graph)
        parameter = next(module.parameters())
        shapes.propagate(torch.zeros(BATCH, *input_shape, device=parameter.device, dtype=parameter.dtype))
        names = {id(parameter): name for name, parameter in module.named_parameters()}  # lazy layers are filled now
        return _Builder(module, names, shapes).build(graph)


class _Tracer(fx.Tracer):
    """Symbolic tracing that names the module in which it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []

    def run(self, module: nn.Module) -> fx.Graph:
        try:
            # Calls pass only the inputs. Other arguments keep their defaults, because control flow may depend on them.
            _, *others = inspect.signature(module.forward).parameters.values()
            constants = {p.name: p.default for p in others if isinstance(p.default, _CONSTANT)}
            # Without fast paths and nested tensors nn.TransformerEncoder has no control flow.
            slow = patch.object(torch.backends.mha, "get_fastpath_enabled", lambda: False)
            with slow, patch.object(transformer, "_get_seq_len", lambda *_: None):
                return self.trace(module, constants)
        except Exception as error:
            where = self.inside[-1] if self.inside else type(module).__name__
            raise ModelError(f"{where}: cannot be traced by torch.fx: {describe(error)[:300]}") from error

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        owner = next(kind.__module__ for kind in type(m).__mro__ if "forward" in vars(kind) or kind is nn.Module)
        return owner.startswith("torch.nn") and not isinstance(m, nn.Sequential) and owner != transformer.__name__

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.inside.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.inside.pop()  # an error skips this, so the top names the module that failed
        return result


class _Shapes(fx.Interpreter):
    """Runs the graph once.

    It notes shapes of tensors in `found`, other results, such as sizes, in `values`, and what gives several in `lists`.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, garbage_collect_values=True, graph=graph)
        self.found: dict[fx.Node, tuple[int, ...]] = {}
        self.values: dict[fx.Node, Any] = {}
        self.lists: set[fx.Node] = set()
        self.current: fx.Node = next(iter(graph.nodes))

    def propagate(self, inputs: Tensor) -> None:
        """Run the graph on a batch; a ModelError names the node that fails."""
        # Catch errors here and not in `run_node`, because the interpreter adds lines to their text.
        try:
            self.run(inputs)
        except Exception as error:
            text = describe(error)[:300].split(" While executing ")[0]
            raise ModelError(f"{_path(self.current)}: fails on inputs {tuple(inputs.shape)}: {text}") from error

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and note its result."""
        self.current = n
        result = super().run_node(n)
        first = result[0] if isinstance(result, tuple | list) and result else result
        if first is not result:
            self.lists.add(n)
        if isinstance(first, Tensor):
            self.found[n] = tuple(first.shape)
        else:
            self.values[n] = result
        return result


def _path(node: fx.Node) -> str:
    """Return the path of the module in which a node was traced, and its operation."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    inside = list(stack.values())[-1][0] if stack else ""
    return f"{inside or 'forward'}: {_name(node)}"


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


class _Builder:
    """Converts fx nodes, in the order of execution, to nodes of a `Graph`."""

    def __init__(self, module: nn.Module, names: dict[int, str], shapes: _Shapes) -> None:
        self.module, self.names = module, names
        self.shapes, self.values, self.lists = shapes.found, shapes.values, shapes.lists
        self.types: list[LayerType] = []
        self.parameters: list[tuple[tuple[str, str], ...]] = []
        self.edges: list[tuple[int, int]] = []
        self.source: dict[fx.Node, int] = {}  # index of the graph node whose output this one holds
        self.branches: dict[fx.Node, bool] = {}  # whether that output has several readers
        self.owned: set[str] = set()

    def build(self, graph: fx.Graph) -> Graph:
        for node in graph.nodes:
            try:
                self._take(node)
            except LayerError as error:
                raise ModelError(f"{_path(node)}: {error}") from None
        if missing := [name for name in self.names.values() if name not in self.owned]:
            raise ModelError(
                f"{missing[0]}: expected every parameter to belong to a layer that the forward pass calls; "
                "this one is never used. Remove it"
            )
        nodes = tuple(Node(*pair) for pair in zip(self.types, self.parameters, strict=True))
        return Graph(nodes, tuple(self.edges), tuple(self.names.values()))

    def _take(self, node: fx.Node) -> None:
        # Collect arguments in a list to keep repeated ones, as in x + x. `all_input_nodes` drops them.
        arguments: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), arguments.append)
        sources = [argument for argument in arguments if argument in self.source]
        if node.op == "placeholder":
            if node in self.shapes:
                self._append(node, LayerType("input"), [])
        elif node.op == "output":
            if len(sources) != 1 or isinstance(node.args[0], tuple | list | dict):
                raise ModelError(f"forward: expected one tensor of outputs, found {str(node.args[0])[:80]}")
            self._append(node, LayerType("output"), sources)
        elif node.op == "call_module":
            self._module(node, sources)
        elif node in self.shapes:
            self._function(node, operations.plain_name(_name(node)), arguments)

    def _function(self, node: fx.Node, name: str, arguments: list[fx.Node]) -> None:
        """Add the nodes of a function and of the parameters that it is the first to read.

        The parameters of one layer in a function of its kind, as in `F.layer_norm`, make the function that layer.
        """
        for argument in arguments:
            target = str(argument.target)
            if argument.op != "get_attr" or argument in self.source:
                continue
            parameter = attrgetter(target)(self.module)
            if not isinstance(parameter, nn.Parameter):
                continue
            kind, role = "factor" if operations.multiplies(argument) else "parameter", "weight"
            layer = LayerType(kind, tuple(parameter.shape))
            for around, named in operations.layers_of(self.module.get_submodule(target.rpartition(".")[0])):
                if around.kind == name:
                    self._layer(node, around, named, [one for one in arguments if one in self.source])
                    return
                if found := [each for each in named if named[each] is parameter]:
                    layer, role = around, found[0]
            self._layer(argument, dataclasses.replace(layer, roles=(role,)), {role: parameter}, [])
        self._call(node, name, self._arguments(node), [one for one in arguments if one in self.source])

    def _module(self, node: fx.Node, sources: list[fx.Node]) -> None:
        module = self.module.get_submodule(str(node.target))
        layers = operations.layers_of(module)
        for layer, named in layers:
            self._layer(node, layer, named, sources)
            sources = [node]
        if layers:
            return
        if found := dict(module.named_parameters()):
            # A supported layer comes here if a hook has changed its parameters, so the message lists them.
            what = f"{type(module).__name__} with parameters {', '.join(found)}"
            raise ModelError(f"{node.target}: cannot represent {what}; supported: {operations.supported()}")
        self._call(node, operations.torch_name(module), vars(module), sources)

    def _layer(self, node: fx.Node, layer: LayerType, named: dict[str, nn.Parameter], sources: list[fx.Node]) -> None:
        for role, parameter in named.items():
            name = self.names[id(parameter)]
            if tuple(parameter.shape) != layer.shape(role):
                shapes = f"shape {layer.shape(role)}, found {tuple(parameter.shape)}"
                raise ModelError(f"{name}: expected {shapes}")
            if not parameter.requires_grad:
                raise ModelError(
                    f"{name}: expected a parameter that trains, found requires_grad=False; "
                    "generated weights would replace what is frozen"
                )
        mine = [(role, self.names[id(parameter)]) for role, parameter in named.items()]
        mine = [(role, name) for role, name in mine if name not in self.owned]  # shared ones have an owner
        self.owned |= {name for _, name in mine}
        self._append(node, layer, sources, tuple(mine))

    def _call(self, node: fx.Node, name: str, arguments: dict[str, Any], sources: list[fx.Node]) -> None:
        if not sources:  # it computes constants
            return
        layer = operations.type_of_call(name, arguments)
        part = name == "getitem" and node.args[0] in self.lists  # of what was split, or of several outputs
        if (
            part
            or name in operations.PASSES
            or (layer is not None and layer.kind in operations.ELEMENTWISE and len(sources) == 1)
        ):
            self._pass(node, sources[0])
        elif layer is None:
            raise ModelError(f"{_path(node)}: cannot represent {name!r}; supported: {operations.supported()}")
        elif layer.kind == "act" and self._fold(node, layer.activation, sources[0]):
            self._pass(node, sources[0])
        else:
            self._append(node, layer, sources)

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        """Return the arguments of a pooling function by name; sizes that the network computes are resolved."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: self.values.get(argument, argument))
        name = operations.plain_name(_name(node))
        order = ("output_size",) if "adaptive" in name else ("kernel_size", "stride")
        own = args[2 if name.startswith("lppool") else 1 :]  # without the inputs, and the exponent of lppool
        return {**dict(zip(order, own, strict=False)), **kwargs}

    def _fold(self, node: fx.Node, activation: str, source: fx.Node) -> bool:
        """Attach an activation to the node before it, if that node has no other reader and no activation yet."""
        index = self.source[source]
        layer = self.types[index]
        if self._branches(source) or layer.activation or layer.kind in ("input", "split"):
            return False
        self.types[index] = dataclasses.replace(layer, activation=activation)
        return True

    def _branches(self, node: fx.Node) -> bool:
        readers = [user for user in node.users if user in self.shapes or user.op == "output"]
        return self.branches[node] or len(readers) > 1

    def _pass(self, node: fx.Node, source: fx.Node) -> None:
        self.branches[node] = self._branches(source)
        self.source[node] = self.source[source]

    def _append(
        self, node: fx.Node, layer: LayerType, sources: list[fx.Node], parameters: tuple[tuple[str, str], ...] = ()
    ) -> None:
        index = len(self.types)
        self.types.append(layer)
        self.parameters.append(parameters)
        self.edges += [(self.source[source], index) for source in sources]
        self.source[node], self.branches[node] = index, False
