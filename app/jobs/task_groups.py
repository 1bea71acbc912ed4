"""asyncio.TaskGroup with the first error raised alone."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """In order; an error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def run_beside(main: Coroutine[Any, Any, T], others: Iterable[Coroutine[Any, Any, object]]) -> T:
    """When `main` ends, the others are cancelled; an error of theirs cancels it."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in others]
            try:
                return await main
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
