"""What an agent answers when the controller asks for a log of its machine: its own, or that of a host it started."""

from __future__ import annotations

from pathways.process import log_files
from pathways.protocol import agent_pb2 as pb


def answer(directory: str, request: pb.ReadLog) -> pb.AgentReport:
    """The piece that was asked for. `directory`: of the agent."""
    is_own = request.host < 0
    path = log_files.own_log(directory) if is_own else log_files.host_log(directory, request.host, request.incarnation)
    piece = pb.LogPiece(request=request.request)
    try:
        read = log_files.read_piece(path, request.offset, request.lines)
        piece.data, piece.end, piece.size = read.data, read.end, read.size
    except FileNotFoundError:
        piece.is_missing = True
        if not is_own:
            piece.incarnations.extend(log_files.incarnations(directory, request.host))
    except OSError as error:
        piece.error = str(error)
    return pb.AgentReport(log_piece=piece)
