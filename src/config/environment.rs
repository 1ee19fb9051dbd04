//! `${NAME}` in a string of the file stands for an environment variable, `$$` for a dollar sign.

/// Where variables come from: the process' environment, or a test's.
pub(super) type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The text can't be expanded. It may be a secret, so no message repeats more of it than the name of a variable.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ExpandError {
    #[error("the environment variable `{0}` is not set; set it, or write `$$` for a dollar sign")]
    Unset(String),
    #[error("`${{` has no `}}`; write `${{NAME}}` for an environment variable, `$$` for a dollar sign")]
    Unclosed,
    #[error(
        "what stands in `${{…}}` is no name; write `${{NAME}}`, the name in letters, digits and `_`, and no default"
    )]
    NoName,
    #[error(
        "a single `$` means nothing; write `${{NAME}}` for an environment variable, `$$` for a dollar sign"
    )]
    LoneDollar,
}

/// The text with every variable replaced. What a variable holds is taken as it is.
pub(super) fn expand(text: &str, environment: Environment<'_>) -> Result<String, ExpandError> {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        rest = if let Some(literal) = after.strip_prefix('$') {
            expanded.push('$');
            literal
        } else {
            let open = after.strip_prefix('{').ok_or(ExpandError::LoneDollar)?;
            let (name, after) = open.split_once('}').ok_or(ExpandError::Unclosed)?;
            expanded.push_str(&look_up(name, environment)?);
            after
        };
    }
    expanded.push_str(rest);
    Ok(expanded)
}

fn look_up(name: &str, environment: Environment<'_>) -> Result<String, ExpandError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || !name.chars().all(allowed) {
        return Err(ExpandError::NoName);
    }
    environment(name).ok_or_else(|| ExpandError::Unset(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(text: &str) -> Result<String, ExpandError> {
        expand(text, &|name| match name {
            "USER" => Some("ada".to_owned()),
            "NESTED" => Some("${USER}$".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        })
    }

    #[test]
    fn variables_are_replaced_once() {
        for (text, expected) in [
            ("", ""),
            ("plain {text}", "plain {text}"),
            ("Bearer ${USER}", "Bearer ada"),
            ("${USER}${USER}-é", "adaada-é"),
            ("${NESTED}", "${USER}$"),
            ("<${EMPTY}>", "<>"),
            ("$$", "$"),
            ("$${USER}", "${USER}"),
            ("$$$$${USER}", "$$ada"),
        ] {
            assert_eq!(expanded(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_variable_is_refused() {
        assert_eq!(expanded("x ${MISSING}"), Err(ExpandError::Unset("MISSING".to_owned())));
        assert_eq!(expanded("${USER"), Err(ExpandError::Unclosed));
        assert_eq!(expanded("${}"), Err(ExpandError::NoName));
        assert_eq!(expanded("${a b}"), Err(ExpandError::NoName));
        assert_eq!(expanded("$USER"), Err(ExpandError::LoneDollar));
        assert_eq!(expanded("$$$"), Err(ExpandError::LoneDollar));
    }

    #[test]
    fn a_message_shows_the_right_form() {
        let message = expanded("pa$word").unwrap_err().to_string();
        assert!(
            message.contains("`${NAME}`") && message.contains("`$$`") && !message.contains("word"),
            "{message}"
        );
    }
}
