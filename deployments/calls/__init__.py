"""Calls between our processes: `rpc` over HTTP with deadlines and successors, and a publisher's session.

Read first: `rpc`.
"""
