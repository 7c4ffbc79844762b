"""What an exported program knows about its graph that the graph does not show."""

from dataclasses import dataclass, field

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec


@dataclass(frozen=True)
class Exported:
    """Of an exported program; without arguments of a graph that belongs to none.

    ``preserved`` names the modules whose signatures are to stay; ``given`` are the tensors that the program keeps for
    inputs of its graph; ``updated`` has for an output, by its place, the input into which it is copied in the end.
    """

    preserved: frozenset[str] = frozenset()
    given: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    updated: dict[int, fx.Node] = field(default_factory=dict)

    @classmethod
    def of(cls, program: torch.export.ExportedProgram) -> "Exported":
        signature, entries = program.graph_signature, program.module_call_graph
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        inputs = {_input(spec): nodes[spec.arg.name] for spec in signature.input_specs if spec.arg.name in nodes}
        tensors = {**program.state_dict, **program.constants}
        given = {node: tensors.get(name) for (_, name), node in inputs.items()}
        updated = {i: inputs.get(_updated_input(spec)) for i, spec in enumerate(signature.output_specs)}
        return cls(
            frozenset(e.fqn.partition("@")[0] for e in entries if e.fqn and e.signature is not None),
            {node: tensor for node, tensor in given.items() if isinstance(tensor, torch.Tensor)},
            {place: node for place, node in updated.items() if node is not None},
        )


def _input(spec: InputSpec) -> tuple[bool, str]:
    """What outputs name an input by: whether the user gives it, and its name there or in the module."""
    users = spec.kind is InputKind.USER_INPUT
    return users, spec.arg.name if users else spec.target


def _updated_input(spec: OutputSpec) -> tuple[bool, str] | None:
    kind = spec.kind
    if kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION):
        return kind is OutputKind.USER_INPUT_MUTATION, spec.target
    return None
