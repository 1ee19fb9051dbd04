//! OpenAI's Responses.

use serde_json::{Value, json};

use super::reply::{Reply, Step};

/// Events of the opening; the words' numbers follow.
const OPENING_EVENTS: usize = 4;

/// The `response` object, complete.
pub(super) fn whole(reply: &Reply) -> Value {
    let usage = json!({
        "input_tokens": reply.input_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.output_tokens(),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.input_tokens + reply.output_tokens(),
    });
    let details = if reply.cut { json!({"reason": "max_output_tokens"}) } else { Value::Null };
    let mut response =
        response(reply, status(reply), &json!([item(reply, status(reply), &json!([part(&reply.text())]))]));
    response["incomplete_details"] = details;
    response["usage"] = usage;
    response
}

/// The named events, each with its place in the stream. There is no `[DONE]`.
pub(super) fn events(reply: &Reply, step: Step) -> String {
    match step {
        Step::Opening => opening(reply),
        Step::Word(index) => event(
            "response.output_text.delta",
            OPENING_EVENTS + index,
            in_part(reply, json!({"delta": reply.piece(index), "logprobs": []})),
        ),
        Step::Closing => closing(reply),
    }
}

fn opening(reply: &Reply) -> String {
    let begun = response(reply, "in_progress", &json!([]));
    let item = item(reply, "in_progress", &json!([]));
    event("response.created", 0, json!({"response": begun}))
        + &event("response.in_progress", 1, json!({"response": begun}))
        + &event("response.output_item.added", 2, json!({"output_index": 0, "item": item}))
        + &event("response.content_part.added", 3, in_part(reply, json!({"part": part("")})))
}

fn closing(reply: &Reply) -> String {
    let next = OPENING_EVENTS + reply.output_tokens();
    let whole = whole(reply);
    let item = &whole["output"][0];
    let end = if reply.cut { "response.incomplete" } else { "response.completed" };
    event("response.output_text.done", next, in_part(reply, json!({"text": reply.text(), "logprobs": []})))
        + &event("response.content_part.done", next + 1, in_part(reply, json!({"part": item["content"][0]})))
        + &event("response.output_item.done", next + 2, json!({"output_index": 0, "item": item}))
        + &event(end, next + 3, json!({"response": whole}))
}

fn event(name: &str, sequence_number: usize, mut data: Value) -> String {
    data["type"] = name.into();
    data["sequence_number"] = sequence_number.into();
    format!("event: {name}\ndata: {data}\n\n")
}

/// The fields that say which text is meant: there is one part in one item.
fn in_part(reply: &Reply, mut data: Value) -> Value {
    data["item_id"] = item_id(reply).into();
    data["output_index"] = 0.into();
    data["content_index"] = 0.into();
    data
}

fn response(reply: &Reply, status: &str, output: &Value) -> Value {
    json!({
        "id": format!("resp_{}", reply.id), "object": "response", "created_at": reply.created, "status": status,
        "background": false, "error": null, "incomplete_details": null, "instructions": null, "metadata": {},
        "model": reply.model, "output": output, "parallel_tool_calls": true, "previous_response_id": null,
        "store": false, "temperature": 1.0, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "top_p": 1.0, "truncation": "disabled", "usage": null, "user": null,
    })
}

fn item(reply: &Reply, status: &str, content: &Value) -> Value {
    json!({"id": item_id(reply), "type": "message", "status": status, "role": "assistant", "content": content})
}

fn item_id(reply: &Reply) -> String {
    format!("msg_{}", reply.id)
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn status(reply: &Reply) -> &'static str {
    if reply.cut { "incomplete" } else { "completed" }
}
