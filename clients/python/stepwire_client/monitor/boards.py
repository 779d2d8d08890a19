"""All dashboards, in the order in which a reader needs them."""

from __future__ import annotations

from stepwire_client.monitor import engine_board, frontend_board, overview_board
from stepwire_client.monitor.panel import Board

BOARDS: tuple[Board, ...] = (overview_board.BOARD, engine_board.BOARD, frontend_board.BOARD)
