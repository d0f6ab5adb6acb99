"""The prompt while its own rank is running: a step over a line that only some ranks run waits for the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vescale.debug._prompt import GOES_ON, QUITS, RESUMES, Prompt
from vescale.debug._stopped_ranks import JobEnded, Session

__all__ = ["RunningPrompt"]

_PATIENCE = 2.0  # seconds, which a line may take without a word


class _Stopped(Exception):
    """This rank has stopped again."""


class RunningPrompt:
    """Reads commands for the other ranks, on a thread, from the time that this rank has been running for a while until it
    stops again (:meth:`end`).

    Args:
        resumes: called when ``c`` lets all ranks go on: this one should not stop again.
    """

    def __init__(self, session: Session, prompt: Prompt, resumes: Callable[[], None]) -> None:
        self._session, self._prompt, self._resumes = session, prompt, resumes
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vescale prompt", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """This rank has stopped: the console is free when this returns."""
        self._has_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        if self._has_stopped.wait(_PATIENCE):
            return
        current, shown = self._prompt.current, ""
        try:
            while True:
                text = self._prompt.running_text()
                if text != shown:
                    shown = text
                    self._prompt.write(text)
                if self._session.stopped() and not self._command():
                    return
                self._poll()
                time.sleep(0.1)
        except _Stopped:
            self._prompt.write("\n")
        except JobEnded as reason:
            self._session.end(str(reason))
        except RuntimeError:  # the job has come to its end, and its store with it
            pass
        finally:
            self._prompt.current = current

    def _poll(self) -> None:
        if self._has_stopped.is_set():
            raise _Stopped
        self._prompt.poll()

    def _command(self) -> bool:
        """Read and execute one; False: all ranks go on."""
        stopped = self._session.stopped()
        if self._prompt.current is not None and self._prompt.current not in stopped:
            self._prompt.current = stopped[0]
        line = self._prompt.read(self._poll)
        command = line.partition(" ")[0]
        if command in QUITS:
            self._prompt.quit()
        if command in RESUMES:
            goes_on = command in GOES_ON
            if goes_on:
                self._session.close()
                self._resumes()
            self._prompt.resume(line)
            if not goes_on:
                self._prompt.await_others()  # ranks that wait for each other meet meanwhile
            return not goes_on
        if command:
            self._prompt.execute(line)
        return True
