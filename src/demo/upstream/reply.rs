//! What the made-up model says, before it is put into a protocol's shape.

use jiff::Timestamp;
use serde_json::Value;
use uuid::Uuid;

use super::{MODEL, Refusal, chat, messages, responses};

/// More of what was said is not repeated.
const MAX_QUOTED_WORDS: usize = 40;

/// The ways to ask a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    /// OpenAI's `/v1/chat/completions`.
    Chat,
    /// OpenAI's `/v1/responses`.
    Responses,
    /// Anthropic's `/v1/messages`.
    Messages,
}

/// One part of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// What comes before the first word.
    Opening,
    /// The word of that index.
    Word(usize),
    /// What comes after the last word.
    Closing,
}

/// An answer, complete, and what it cost.
pub(super) struct Reply {
    api: Api,
    words: Vec<String>,
    /// Unique, without a protocol's prefix.
    pub(super) id: String,
    /// As the request names it.
    pub(super) model: String,
    /// Seconds since 1970.
    pub(super) created: i64,
    /// Words of everything that was sent.
    pub(super) input_tokens: usize,
    /// The request's bound cut the answer short.
    pub(super) cut: bool,
    /// A chat's stream ends with the usage only if that was asked for.
    pub(super) include_usage: bool,
}

impl Reply {
    /// Thinks.
    pub(super) fn to(api: Api, body: &Value) -> Result<Self, Refusal> {
        let prompt = Prompt::read(api, body)?;
        let mut words = answer_to(&prompt.last_said);
        let bound = ["max_completion_tokens", "max_output_tokens", "max_tokens"]
            .iter()
            .find_map(|name| body[name].as_u64())
            .map_or(usize::MAX, |bound| bound.max(1) as usize);
        let cut = words.len() > bound;
        words.truncate(bound);
        Ok(Self {
            api,
            words,
            id: Uuid::new_v4().simple().to_string(),
            model: body["model"].as_str().unwrap_or(MODEL).to_owned(),
            created: Timestamp::now().as_second(),
            input_tokens: prompt.tokens,
            cut,
            include_usage: body["stream_options"]["include_usage"] == true,
        })
    }

    /// All of it in one JSON object.
    pub(super) fn whole(&self) -> Value {
        match self.api {
            Api::Chat => chat::whole(self),
            Api::Responses => responses::whole(self),
            Api::Messages => messages::whole(self),
        }
    }

    /// The stream's part of that number, as long as there is one.
    pub(super) fn step(&self, number: usize) -> Option<Step> {
        let closing = self.words.len() + 1;
        match number {
            0 => Some(Step::Opening),
            _ if number < closing => Some(Step::Word(number - 1)),
            _ => (number == closing).then_some(Step::Closing),
        }
    }

    /// The part as server-sent events, one or several.
    pub(super) fn events(&self, step: Step) -> String {
        match self.api {
            Api::Chat => chat::events(self, step),
            Api::Responses => responses::events(self, step),
            Api::Messages => messages::events(self, step),
        }
    }

    /// Everything that is said.
    pub(super) fn text(&self) -> String {
        self.words.join(" ")
    }

    /// The word with the space before it, so that the pieces add up to the text.
    pub(super) fn piece(&self, index: usize) -> String {
        if index == 0 { self.words[0].clone() } else { format!(" {}", self.words[index]) }
    }

    /// Words of the answer.
    pub(super) fn output_tokens(&self) -> usize {
        self.words.len()
    }
}

/// What was asked.
struct Prompt {
    /// Words of all messages and of the instructions.
    tokens: usize,
    /// The user's last message.
    last_said: String,
}

impl Prompt {
    fn read(api: Api, body: &Value) -> Result<Self, Refusal> {
        let (turns, instructions) = match api {
            Api::Chat => ("messages", &Value::Null),
            Api::Responses => ("input", &body["instructions"]),
            Api::Messages => ("messages", &body["system"]),
        };
        let mut prompt = Self { tokens: count(&text_of(instructions)), last_said: String::new() };
        match &body[turns] {
            Value::String(said) if api == Api::Responses => prompt.hear("user", said.clone()),
            Value::Array(heard) if !heard.is_empty() => {
                for turn in heard {
                    prompt.hear(turn["role"].as_str().unwrap_or_default(), text_of(&turn["content"]));
                }
            }
            _ => return Err(Refusal::Malformed(format!("`{turns}` is missing or empty"))),
        }
        Ok(prompt)
    }

    fn hear(&mut self, role: &str, said: String) {
        self.tokens += count(&said);
        if role == "user" && !said.is_empty() {
            self.last_said = said;
        }
    }
}

/// Content is a string, or a list of parts of which some are text.
fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join(" ")
        }
        _ => String::new(),
    }
}

/// Tokens of a text: the words between white space.
pub(super) fn count(text: &str) -> usize {
    text.split_whitespace().count()
}

fn answer_to(said: &str) -> Vec<String> {
    let mut quoted: Vec<_> = said.split_whitespace().take(MAX_QUOTED_WORDS + 1).collect();
    if quoted.len() > MAX_QUOTED_WORDS {
        quoted[MAX_QUOTED_WORDS] = "…";
    }
    let echo = if quoted.is_empty() { "nothing".to_owned() } else { format!("“{}”", quoted.join(" ")) };
    let text = format!(
        "You said: {echo}. This is a made-up model behind Tollgate: it costs nothing, and it knows nothing either."
    );
    text.split_whitespace().map(str::to_owned).collect()
}
