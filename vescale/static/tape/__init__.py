"""The tape of a recorded step: its calls in order, which a static forward is compared with, call by call."""

from vescale.static.tape._analysis import RecordedTape, recorded_tape
from vescale.static.tape._program import TapeProgram
from vescale.static.tape._recorder import TapeRecorder
