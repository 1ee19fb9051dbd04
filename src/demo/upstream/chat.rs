//! OpenAI's chat completions.

use serde_json::{Value, json};

use super::reply::{Reply, Step};

/// `chat.completion`.
pub(super) fn whole(reply: &Reply) -> Value {
    json!({
        "id": id(reply), "object": "chat.completion", "created": reply.created, "model": reply.model,
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": reply.text(), "refusal": null},
            "logprobs": null,
            "finish_reason": finish_reason(reply),
        }],
        "usage": usage(reply),
    })
}

/// `chat.completion.chunk`s, which have no event names, and `[DONE]`.
pub(super) fn events(reply: &Reply, step: Step) -> String {
    match step {
        Step::Opening => delta(reply, json!({"role": "assistant", "content": ""}), Value::Null),
        Step::Word(index) => delta(reply, json!({"content": reply.piece(index)}), Value::Null),
        Step::Closing => {
            let mut events = delta(reply, json!({}), json!(finish_reason(reply)));
            if reply.include_usage {
                events += &event(&chunk(reply, json!([]), usage(reply)));
            }
            events + "data: [DONE]\n\n"
        }
    }
}

fn delta(reply: &Reply, delta: Value, finish_reason: Value) -> String {
    let choices = json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason}]);
    event(&chunk(reply, choices, Value::Null))
}

fn chunk(reply: &Reply, choices: Value, usage: Value) -> Value {
    let mut chunk = json!({
        "id": id(reply), "object": "chat.completion.chunk", "created": reply.created, "model": reply.model,
        "choices": choices,
    });
    // Who did not ask for the usage does not see the field.
    if reply.include_usage {
        chunk["usage"] = usage;
    }
    chunk
}

fn event(data: &Value) -> String {
    format!("data: {data}\n\n")
}

fn id(reply: &Reply) -> String {
    format!("chatcmpl-{}", reply.id)
}

fn finish_reason(reply: &Reply) -> &'static str {
    if reply.cut { "length" } else { "stop" }
}

fn usage(reply: &Reply) -> Value {
    let (input, output) = (reply.input_tokens, reply.output_tokens());
    json!({
        "prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    })
}
