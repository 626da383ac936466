"""Request bodies, as far as the gateway reads them.

Message contents and prompts are `Raw`, so a long prompt is scanned once and never copied. Fields that are not named
here are forwarded to the engine with the body.
"""

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType, field


class StreamOptions(Struct):
    include_usage: bool | None = None


class ResponseFormat(Struct):
    type: str


MISSING_RAW = Raw(b"null")
"""The content of a message without one."""


class MessageSchema(Struct):
    """A chat message. Its content stays undecoded."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Raw = field(default_factory=lambda: MISSING_RAW)


class TextPart(Struct):
    type: str
    text: str | UnsetType = UNSET


class MediaPart(Struct):
    """A part of a message, as far as it may hold media. Each type has a field of its own name."""

    type: str = ""
    image_url: Raw | UnsetType = UNSET
    image_embeds: Raw | UnsetType = UNSET
    input_image: Raw | UnsetType = UNSET
    input_audio: Raw | UnsetType = UNSET
    audio_url: Raw | UnsetType = UNSET
    audio_embeds: Raw | UnsetType = UNSET
    video_url: Raw | UnsetType = UNSET
    input_video: Raw | UnsetType = UNSET
    file: Raw | UnsetType = UNSET
    input_file: Raw | UnsetType = UNSET

    def contents(self) -> tuple[Raw | UnsetType, ...]:
        return (
            self.image_url, self.image_embeds, self.input_image, self.input_audio, self.audio_url, self.audio_embeds,
            self.video_url, self.input_video, self.file, self.input_file,
        )  # fmt: skip


class CalledFunction(Struct):
    name: str
    arguments: str


class MessageToolCall(Struct):
    id: str
    function: CalledFunction


class Message(Struct):
    role: str
    content: str | list[TextPart] | None = None
    tool_calls: Raw | UnsetType = UNSET
    tool_call_id: str | None = None
    name: str | None = None


class RawMessages(Struct):
    messages: Raw


class ReservedFields(Struct, kw_only=True):
    """Fields with which a client could choose its place in an engine's queue, another tenant's KV, its id or its host.
    Only the gateway sets them: null is accepted, other values are refused.
    """

    priority: None = None
    request_id: None = None
    session_id: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    vllm_xargs: None = None
    # SGLang
    rid: None = None
    extra_key: None = None
    session_params: None = None
    lora_path: None = None
    data_parallel_rank: None = None
    routed_dp_rank: None = None
    bootstrap_host: None = None
    bootstrap_port: None = None
    bootstrap_room: None = None
    # TensorRT-LLM
    disaggregated_params: None = None


class GenerationRequest(ReservedFields, kw_only=True):
    """Fields of all APIs that generate text."""

    model: str
    stream: bool | UnsetType | None = UNSET
    stream_options: StreamOptions | UnsetType | None = UNSET
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    service_tier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    # Read only to refuse features that a worker lacks.
    logit_bias: Raw | UnsetType = UNSET
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    echo: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Raw | UnsetType = UNSET
    guided_json: Raw | UnsetType = UNSET
    guided_regex: Raw | UnsetType = UNSET
    guided_choice: Raw | UnsetType = UNSET
    guided_grammar: Raw | UnsetType = UNSET
    include_stop_str_in_output: Raw | UnsetType = UNSET
    skip_special_tokens: Raw | UnsetType = UNSET
    allowed_token_ids: Raw | UnsetType = UNSET
    bad_words: Raw | UnsetType = UNSET
    logits_processors: Raw | UnsetType = UNSET
    truncate_prompt_tokens: Raw | UnsetType = UNSET
    thinking_token_budget: Raw | UnsetType = UNSET
    chat_template: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET


class ChatOptions(GenerationRequest, kw_only=True):
    """Fields of chat completions besides messages and tools, which other APIs for chats have in shapes of their own."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: Raw | UnsetType = UNSET
    modalities: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET
    continue_final_message: bool | None = None


class JsonSchemaFormat(Struct):
    schema: Raw
    strict: bool | None = None


class StructuredFormat(Struct):
    """A `response_format` with all that an engine needs."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`, as far as the embedded engine takes it."""

    json: Raw | UnsetType = UNSET
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FunctionSchema(Struct):
    name: str
    parameters: Raw | UnsetType = UNSET
    strict: bool | None = None


class FunctionTool(Struct):
    type: str
    function: FunctionSchema | None = None


class FunctionName(Struct):
    name: str


class NamedToolChoice(Struct):
    type: str
    function: FunctionName | None = None


class ConstraintFields(Struct):
    """The fields of a body that say what its output must match."""

    response_format: StructuredFormat | None = None
    structured_outputs: Raw | UnsetType = UNSET
    guided_json: Raw | UnsetType = UNSET
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Raw | UnsetType = UNSET


class ChatCompletionRequest(ChatOptions, kw_only=True):
    messages: list[MessageSchema]
    tools: Raw | UnsetType = UNSET
    tool_choice: Raw | UnsetType = UNSET
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Raw
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
