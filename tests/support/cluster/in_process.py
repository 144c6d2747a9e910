"""Actors in this process, for tests that decide in which order calls are carried out.

:class:`InProcessRay` replaces the module ``ray`` (and ``time``) in the cluster's cache. A call
waits until the test carries it out, or until something waits for its answer; the clock moves only
while something waits. Real Ray runs in test_cluster, test_nodes and test_network.
"""

import contextlib
from types import SimpleNamespace

import ray.exceptions


class Call:
    """A call of an actor's method, and its answer once it is carried out."""

    def __init__(self, caller, actor, method, args, ordered):
        self.caller, self.actor, self.method, self.args = caller, actor, method, args
        self.ordered = ordered  # after earlier calls of the same caller
        self.done = False
        self.value = self.error = None

    def future(self):
        return self

    def finish(self, value=None, error=None):
        self.done, self.value, self.error = True, value, error


class Method:
    def __init__(self, actor, name, ordered=True):
        self._actor, self._name, self._ordered = actor, name, ordered

    def options(self, concurrency_group):
        return Method(self._actor, self._name, ordered=False)

    def remote(self, *args):
        return self._actor.world.submit(self._actor, self._name, args, self._ordered)


class Actor:
    """A handle of an object in this process."""

    def __init__(self, world, target):
        self.world, self.target = world, target
        self.alive, self.stopped = target is not None, False
        self.hanging = set()  # methods whose calls never end

    def __getattr__(self, name):
        return Method(self, name)


class InProcessRay:
    """The part of ``ray`` and ``time`` that clients and coordinator call.

    Args:
        create: makes the object of an actor, from its class, node and arguments; None: its node is
            dead.

    Attributes:
        nodes_alive: id of each node that appears alive, to the address of its machine.
        here: id of the node that the caller is on.
        background: what continues while something waits.
    """

    exceptions = ray.exceptions

    def __init__(self, create):
        self.create = create
        self.now = 1000.0
        self.nodes_alive = {}
        self.here = ""
        self.caller = ""
        self.pending = []
        self.background = lambda: None

    def install(self, monkeypatch, *modules):
        for module in modules:
            for name in ("ray", "time"):
                if isinstance(getattr(module, name), InProcessRay):
                    setattr(module, name, self)  # what monkeypatch undoes is there already
                else:
                    monkeypatch.setattr(module, name, self)

    @contextlib.contextmanager
    def acting(self, caller):
        before, self.caller = self.caller, caller
        try:
            yield
        finally:
            self.caller = before

    # As of ``time``

    def monotonic(self):
        return self.now

    def time_ns(self):
        return int(self.now * 1e9)

    # As of ``ray``

    def nodes(self):
        return [
            {"NodeID": node, "NodeManagerAddress": machine, "Alive": True}
            for node, machine in self.nodes_alive.items()
        ]

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: self.here, was_current_actor_reconstructed=False)

    def remote(self, **_):
        def actor_class(cls):
            def options(scheduling_strategy):
                def start(*args):
                    return Actor(self, self.create(cls, scheduling_strategy.node_id, args))

                return SimpleNamespace(remote=start)

            return SimpleNamespace(options=options)

        return actor_class

    def wait(self, calls, num_returns, timeout, fetch_local=True):
        until = self.now + timeout
        while timeout and not all(call.done for call in calls):
            if any(self.carry_out(call) for call in calls):
                continue
            if self.now >= until:
                break
            self.now = min(until, self.now + 1.0)
            self.background()
        done = [call for call in calls if call.done]
        return done, [call for call in calls if not call.done]

    def get(self, call, timeout=60.0):
        self.wait([call], 1, timeout)
        if call.error is not None:
            raise call.error
        assert call.done
        return call.value

    # What a test does

    def submit(self, actor, method, args, ordered):
        call = Call(self.caller, actor, method, args, ordered)
        if actor.alive:
            self.pending.append(call)
        else:
            call.finish(error=ray.exceptions.RayActorError())
        return call

    def possible(self):
        """The calls that can be carried out next, oldest first."""
        behind, possible = set(), []
        for call in self.pending:
            queue = (call.caller, id(call.actor), call.ordered)
            waits = any(isinstance(arg, Call) and not arg.done for arg in call.args)
            waits = waits or call.method in call.actor.hanging
            if not call.actor.stopped and not waits and not (call.ordered and queue in behind):
                possible.append(call)
            behind.add(queue)
        return possible

    def carry_out(self, call):
        """Carry out a call, or one that must come before it; return whether there was any."""
        possible = self.possible()
        queue = (call.caller, call.actor, call.ordered)
        for earlier in possible if not call.done else ():
            if earlier is call or (
                call.ordered and (earlier.caller, earlier.actor, earlier.ordered) == queue
            ):
                self._run(earlier)
                return True
        return False

    def carry_out_all_of(self, caller):
        """Carry out what a caller waits for, as far as possible."""
        while calls := [call for call in self.possible() if call.caller == caller]:
            self._run(calls[0])

    def _run(self, call):
        self.pending.remove(call)
        args = [arg.value if isinstance(arg, Call) else arg for arg in call.args]
        errors = [arg.error for arg in call.args if isinstance(arg, Call) and arg.error]
        try:
            if errors:
                raise errors[0]
            call.finish(getattr(call.actor.target, call.method)(*args))
        except Exception as error:  # the caller gets it
            call.finish(error=error)

    def kill(self, actor):
        actor.alive = False
        for call in [call for call in self.pending if call.actor is actor]:
            self.pending.remove(call)
            call.finish(error=ray.exceptions.RayActorError())
