"""What ranks agree on, and how they find out that they do not: through the job's store, which no other package touches."""

from vescale.agreement._heartbeat import FIRST_MESSAGES, Beat, Heartbeat, settle_heartbeats
from vescale.agreement._round import (
    PAUSED,
    Description,
    Difference,
    HandedIn,
    Round,
    add_post,
    added_posts,
    await_posts,
    compare_descriptions,
    first_difference,
    listen_to_descriptions,
    post,
    post_once,
    posted,
    ranks_text,
    read_post,
    wait_limit,
)
from vescale.agreement._watch import Apart, Watch, end_for, end_soon
