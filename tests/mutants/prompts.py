"""Calls with several prompts and with media, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

_LIST = ("tests/ingress/openai/test_prompt_list.py",)
_CHOICES = ("tests/ingress/openai/test_merged_choices.py",)
_REPLY = ("tests/ingress/openai/test_merged_reply.py",)
_MEDIA = ("tests/ingress/openai/test_media.py",)
_CALLS = ("tests/e2e/test_several_prompts.py",)

GROUP = MutantGroup(
    tests=(*_LIST, *_CHOICES, *_REPLY, *_MEDIA),
    mutants=(
        Mutant(
            "one prompt more than allowed is admitted",
            "ingress/openai/prompt_list.py",
            "if len(found) == max_prompts:",
            "if len(found) > max_prompts:",
            _LIST,
        ),
        Mutant(
            "copies of the other fields are not bounded",
            "ingress/openai/prompt_list.py",
            "if len(prompts) * len(shared_fields) > max_bytes:",
            "if len(shared_fields) > max_bytes:",
            _LIST,
        ),
        Mutant(
            "choices of one prompt overlap those of the next",
            "ingress/openai/merged_choices.py",
            "prompt * self._choices + index",
            "prompt + index",
            _CHOICES,
        ),
        Mutant(
            "a worker's index may reach into the next prompt",
            "ingress/openai/merged_choices.py",
            "not 0 <= index < self._choices",
            "not 0 <= index <= self._choices",
            _CHOICES,
        ),
        Mutant(
            "every prompt has its own usage event",
            "ingress/openai/merged_choices.py",
            "                self._usage_event = event\n                continue\n",
            "                self._usage_event = event\n",
            _CHOICES,
        ),
        Mutant(
            "nested counts are those of the first prompt",
            "ingress/openai/merged_choices.py",
            "            add_usage(known, value)\n",
            "                add_usage(known, value)\n",
            _CHOICES,
        ),
        Mutant(
            "a failed prompt leaves the others running",
            "ingress/openai/merged_reply.py",
            "            self._reply.end(self._take_unread() + events)\n"
            '            self._cancel_open(CallAborted("another prompt of the call failed"))\n',
            "            self._reply.end(self._take_unread() + events)\n",
            _REPLY,
        ),
        Mutant(
            "the first prompt that ends is the end of the call",
            "ingress/openai/merged_reply.py",
            "        elif self._open:\n            self._send(events)\n",
            "",
            _REPLY,
        ),
        Mutant(
            "every prompt has its own heartbeat",
            "ingress/openai/merged_reply.py",
            "elif prompt == next(iter(self._open)):",
            "else:",
            _REPLY,
        ),
        Mutant(
            "unread events are overtaken",
            "ingress/openai/merged_reply.py",
            "if not self._reply.is_paused and not self._unread:",
            "if not self._reply.is_paused or not self._unread:",
            _REPLY,
        ),
        Mutant(
            "an admitted prompt runs although another was refused",
            "dispatch/gateway.py",
            '                self.cancel(job.job_id, CallAborted("another prompt of the call was refused"))\n',
            "                pass\n",
            _CALLS,
        ),
        Mutant(
            "the second prompt is a repetition of the first",
            "ingress/openai/prompt_calls.py",
            'name=f"{repeat.name} {index}"',
            "name=repeat.name",
            _CALLS,
        ),
        Mutant(
            "the ratio of tokens to bytes is learned from images",
            "prediction/estimator.py",
            "if not prompt.is_exact and not job.payload.media_bytes:",
            "if not prompt.is_exact:",
            _MEDIA,
        ),
    ),
)
