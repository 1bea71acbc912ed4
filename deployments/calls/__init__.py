"""Calls between our processes: `rpc` over HTTP, calls whose answer was lost, and one publish session.

Read first: `rpc`.
"""
